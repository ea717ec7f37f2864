"""The Trainer of one local training: the loss of a step, in however many parts, and its learning rate.

transformers' Trainer does the work. What is added is what a federation needs: the proximal term, a course of learning
rates given from outside, figures of each step, and nothing written or shown. It knows nothing of rounds or clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from fedmem.models.examples import IGNORED

MAX_GRAD_NORM = 1.0  # the Trainer's own clipping, named because it is part of the method


class TrainingError(RuntimeError):
    """A local training that cannot give a usable model; the message says why."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: predicted tokens, what was minimised, in its two parts, and the learning rate it took.

    loss: mean cross-entropy per predicted token of the step's rows, in nats, without the penalty; penalty: the
    proximal term (μ/2)·‖w − w_t‖², 0 where there is none. Both are of the weights before the step.
    """

    tokens: int
    loss: float
    penalty: float
    learning_rate: float


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name; a tied one appears once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def proximal_penalty(parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor], mu: float) -> Tensor:
    """(μ/2)·‖w − w_t‖², the squared Euclidean norm over all parameters together (a scalar tensor).

    w: `parameters`; w_t: `anchor`, the weights that training starts from, under the same names.
    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks" (FedProx), equation 2.
    """
    return mu / 2 * sum((parameters[name] - anchor[name]).square().sum() for name in parameters)


def n_predicted(batch: Mapping[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())  # a row's first token is never predicted


class LocalTrainer(Trainer):
    """transformers' Trainer with the proximal term in the loss, and the course of the learning rate given.

    A step's loss is the mean over all its predicted tokens, in however many parts (gradient accumulation) it is
    computed, and the proximal term counts once a step.
    """

    loss_is_scaled_for_ga = True  # by the tokens of each part, below

    def __init__(self, *, config, rates: Sequence[float], proximal_mu: float, **kwargs):
        super().__init__(**kwargs)
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False  # a part's loss is the mean over its own tokens, as in evaluation
        self.half = config.precision == "bf16"
        self.rates = rates
        self.course: list[Step] = []
        self.proximal_mu = proximal_mu
        self.parameters = trained_parameters(self.model)
        # Cloned now, while the model still holds the weights it was given: an alias would move with them.
        self.anchor = {name: p.detach().clone() for name, p in self.parameters.items()} if proximal_mu else {}

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0  # the scheduler multiplies this by the rate
        rates = (*self.rates, self.rates[-1])  # it looks one step beyond the last
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rates.__getitem__)
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The parts of one optimizer step."""
        parts, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.parts_done, self.step_tokens, self.step_loss, self.step_penalty = 0, sum(map(n_predicted, parts)), 0.0, 0.0
        self.n_parts = len(parts)
        return parts, None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.half):
            outputs = model(**inputs, use_cache=False)
        total = outputs.loss * (n_predicted(inputs) / self.step_tokens)
        self.step_loss += total.item()
        if self.proximal_mu and not self.parts_done:
            term = proximal_penalty(self.parameters, self.anchor, self.proximal_mu)
            total, self.step_penalty = total + term, term.item()
        self.parts_done += 1
        if self.parts_done == self.n_parts:
            self._note()
        return (total, outputs) if return_outputs else total

    def _note(self) -> None:
        if not math.isfinite(self.step_loss + self.step_penalty):
            raise TrainingError(
                f"step {len(self.course) + 1} of {len(self.rates)}: the loss is {self.step_loss}, the penalty "
                f"{self.step_penalty}; both must be finite. Nothing of this training is kept. Lower learning_rate, or "
                "proximal_mu if it is large."
            )
        rate = self.rates[len(self.course)]
        self.course.append(Step(self.step_tokens, self.step_loss, self.step_penalty, rate))

    def release(self) -> None:
        """Drop what is as large as the model, and take off what recomputing put on it.

        A Trainer is part of reference cycles and would keep all this for a while.
        """
        self.model.zero_grad(set_to_none=True)
        if self.optimizer is not None:
            self.optimizer.state.clear()
        self.anchor.clear()
        if self.args.activation_checkpointing:
            self.model.activation_checkpointing_disable()
            self.model.disable_input_require_grads()


def training_arguments(model, config, steps: int, seed: int, folder: str) -> TrainingArguments:
    """The Trainer's settings: what `config` says, and nothing written or shown."""
    on_cpu = model.device.type == "cpu"
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=config.batch_size // config.gradient_accumulation,
        gradient_accumulation_steps=config.gradient_accumulation,
        activation_checkpointing=config.gradient_checkpointing,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=MAX_GRAD_NORM,
        seed=seed,
        data_seed=seed,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        # The Trainer writes this into the model's config, and so into every checkpoint: keep what is there.
        use_cache=getattr(model.config, "use_cache", True),
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one device: more would be wrapped and change the batch size
    return arguments
