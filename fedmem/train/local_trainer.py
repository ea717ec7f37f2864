"""The Trainer of one local training: the loss of each step, with gradient accumulation, and its learning rate.

It extends transformers' Trainer by what federated training needs: the proximal term, a learning rate given for each
step, and a record of each step. It writes no files and prints nothing.
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
    """A local training that does not give a usable model; the message says why."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: its size, the two parts of the minimised loss, and its learning rate.

    tokens: predicted tokens of the step's rows.
    loss: mean cross-entropy per predicted token of the step's rows, in nats, without the penalty.
    penalty: the proximal term (μ/2)·‖w − w_t‖²; 0 without one.
    learning_rate: the rate of this step.
    loss and penalty are computed with the weights before the step.
    """

    tokens: int
    loss: float
    penalty: float
    learning_rate: float


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; a tied parameter appears once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def proximal_penalty(parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor], mu: float) -> Tensor:
    """(μ/2)·‖w − w_t‖², the squared Euclidean norm over all parameters together (a scalar tensor).

    parameters: the current weights w, by name, of any shape.
    anchor: the weights w_t that training starts from, under the same names and in the same shapes.
    mu: μ ≥ 0, the weight of the term.
    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks" (FedProx), equation 2.
    """
    return mu / 2 * sum((parameters[name] - anchor[name]).square().sum() for name in parameters)


def n_predicted(batch: Mapping[str, Tensor]) -> int:
    """The number of predicted tokens: labels of the batch (rows × tokens) that the loss counts."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())  # a row's first token is never predicted


class LocalTrainer(Trainer):
    """transformers' Trainer with the proximal term in the loss and a learning rate given for each step.

    config: the train stage's parameters, of which `precision` is read. rates: the learning rate of each step.
    proximal_mu: μ ≥ 0 of the proximal term. kwargs: the arguments of transformers' Trainer.
    A step's loss is the mean over all its predicted tokens, whatever the number of its parts (gradient accumulation).
    The proximal term counts once a step.
    """

    loss_is_scaled_for_ga = True  # `compute_loss` scales each part by its tokens, so the Trainer must not

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
        rates = (*self.rates, self.rates[-1])  # the scheduler also asks for the rate after the last step
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rates.__getitem__)
        return self.lr_scheduler

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of one optimizer step, whose number of predicted tokens scales each part's loss.

        epoch_iterator: the iterator over the epoch's batches. num_batches: batches of this step, ≥ 1.
        device: the device of the batches, which transformers' method needs.
        Returns (batches, None), as transformers' method does when it counts no tokens.
        """
        parts, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.parts_done, self.step_tokens, self.step_loss, self.step_penalty = 0, sum(map(n_predicted, parts)), 0.0, 0.0
        self.n_parts = len(parts)
        return parts, None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss of one part of a step: its share of the step's mean cross-entropy, plus the penalty in the first.

        model: the causal language model. inputs: one batch of `pad_batch`, each tensor (rows × tokens).
        return_outputs: True returns (loss, outputs) instead of the loss. num_items_in_batch: not used.
        Raises TrainingError when the loss of the completed step is not finite.
        """
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.half):
            outputs = model(**inputs, use_cache=False)
        total = outputs.loss * (n_predicted(inputs) / self.step_tokens)
        self.step_loss += total.item()
        if self.proximal_mu and not self.parts_done:  # gradients add up over the parts: the term belongs to one of them
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
                f"{self.step_penalty}; both must be finite. This training is discarded. Lower learning_rate, or "
                "proximal_mu if it is large."
            )
        rate = self.rates[len(self.course)]
        self.course.append(Step(self.step_tokens, self.step_loss, self.step_penalty, rate))

    def release(self) -> None:
        """Free the gradients, the optimizer's state and the anchor, and remove the hooks of activation checkpointing.

        A Trainer is part of reference cycles, so its memory would otherwise be freed only by the garbage collector.
        """
        self.model.zero_grad(set_to_none=True)
        if self.optimizer is not None:
            self.optimizer.state.clear()
        self.anchor.clear()
        if self.args.activation_checkpointing:
            self.model.activation_checkpointing_disable()
            self.model.disable_input_require_grads()


def training_arguments(model, config, steps: int, seed: int, folder: str) -> TrainingArguments:
    """The Trainer's settings, taken from `config`; all logging and saving is off.

    model: the model to train; its device decides where training runs.
    config: the train stage's parameters. steps: optimizer steps, ≥ 1.
    seed: seed of the order of the rows and of dropout, ≥ 0.
    folder: the Trainer's output folder, which stays empty.
    """
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
        # The Trainer writes this into the model's config, and so into every checkpoint: keep the model's own value.
        use_cache=getattr(model.config, "use_cache", True),
        remove_unused_columns=False,
        logging_nan_inf_filter=False,  # `_note` stops the training at a loss that is not finite
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    # with several GPUs, the Trainer would wrap the model for all of them and multiply the batch size
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
