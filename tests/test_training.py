"""The local step: hand-computed on a model of two parameters, and against a plain loop on a tiny Qwen2."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fedmem.config.stages import TrainConfig
from fedmem.models.examples import IGNORED, pad_batch
from fedmem.train.local_trainer import TrainingError, proximal_penalty, trained_parameters
from fedmem.train.local_training import derive_seed, evaluate_loss, learning_rate, steps_per_round, train_locally

EOS = 0


def settings(**changes) -> TrainConfig:
    return TrainConfig(**{"learning_rate": 1e-3, "batch_size": 4, "weight_decay": 0.0} | changes)


def row(*ids: int, labels=None) -> dict:
    return {"input_ids": list(ids), "labels": list(ids) if labels is None else list(labels)}


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=300, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    ).eval()


@pytest.fixture
def rows() -> list[dict]:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 24, (12,), generator=draw).tolist()
    return [row(*torch.randint(1, 300, (length,), generator=draw).tolist(), EOS) for length in lengths]


class TwoParameters(torch.nn.Module):
    """loss = w₁ − w₂ whatever the rows: the gradient is always (1, −1)."""

    def __init__(self, start=(0.0, 0.0)):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(start))
        self.config, self.device = SimpleNamespace(use_cache=True), torch.device("cpu")

    def forward(self, input_ids, labels=None, attention_mask=None, use_cache=None):
        return SimpleNamespace(loss=self.w[0] - self.w[1])


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def test_the_proximal_term_is_half_mu_times_the_squared_norm():
    w = torch.tensor([4.0, 6.0], requires_grad=True)
    term = proximal_penalty({"w": w}, {"w": torch.tensor([1.0, 2.0])}, mu=2.0)
    term.backward()
    assert term.item() == 25.0  # 2/2 · (3² + 4²)
    assert w.grad.tolist() == [6.0, 8.0]  # μ · (3, 4)


def test_the_squared_norm_runs_over_all_parameters_together():
    parameters = {"a": torch.tensor([[3.0]]), "b": torch.tensor([4.0, 0.0])}
    anchor = {"a": torch.zeros(1, 1), "b": torch.zeros(2)}
    assert proximal_penalty(parameters, anchor, mu=1.0).item() == 12.5  # (9 + 16) / 2


def test_the_anchor_is_the_start_and_does_not_move_with_the_weights():
    model = TwoParameters()
    result = train_locally(model, [row(1, 2)], config=settings(learning_rate=0.5), steps=2, seed=0, proximal_mu=2.0)
    # Step 1 stands on the anchor: penalty 0, loss 0 − 0. AdamW's first step is the learning rate against the
    # gradient's signs: w = (−0.5, 0.5). Step 2: loss −0.5 − 0.5 = −1, penalty 2/2 · (0.25 + 0.25) = 0.5.
    assert [step.penalty for step in result.course] == pytest.approx([0.0, 0.5], abs=1e-6)
    assert [step.loss for step in result.course] == pytest.approx([0.0, -1.0], abs=1e-6)  # without the penalty
    assert result.penalty == pytest.approx(0.25, abs=1e-6)


def test_without_mu_nothing_is_added(model, rows):
    plain, zero = model, copy.deepcopy(model)
    train_locally(plain, rows, config=settings(local_epochs=2), seed=5)
    train_locally(zero, rows, config=settings(local_epochs=2), seed=5, proximal_mu=0.0)
    assert torch.equal(weights(plain), weights(zero))


def test_larger_mu_smaller_drift(model, rows):
    start, moved = weights(model), []
    for mu in (0.0, 1.0, 30.0):
        trainee = copy.deepcopy(model)
        train_locally(trainee, rows, config=settings(local_epochs=3), seed=5, proximal_mu=mu)
        moved.append((weights(trainee) - start).norm().item())
    assert moved[0] > moved[1] > moved[2] > 0


def test_it_takes_the_steps_of_a_plain_loop(model, rows):
    reference = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(3):  # one batch holds all rows, so no order matters
        optimizer.zero_grad()
        reference(**pad_batch(rows)).loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
    result = train_locally(model, rows, config=settings(batch_size=len(rows), local_epochs=3), seed=0)
    assert result.steps == 3
    # Each weight moves by about 3e-3; the order of rows within the batch alone gives other last bits.
    torch.testing.assert_close(weights(model), weights(reference), atol=2e-5, rtol=0)


@pytest.mark.parametrize("mu", [0.0, 20.0])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_batch_in_parts_is_the_same_step(model, rows, parts, mu):
    # Rows of very different lengths, some without labels at their beginning: the parts' numbers of tokens differ. Ten
    # rows at eight a step leave a last step of two rows, in one part of two and in two parts of one.
    rows = [each | {"labels": [IGNORED] * (n % 5) + each["labels"][n % 5 :]} for n, each in enumerate(rows[:10])]
    whole, parted = model, copy.deepcopy(model)
    config = {"batch_size": 8, "local_epochs": 2}
    expected = train_locally(whole, rows, config=settings(**config), seed=3, proximal_mu=mu)
    config["gradient_accumulation"] = parts
    result = train_locally(parted, rows, config=settings(**config), seed=3, proximal_mu=mu)
    assert [step.tokens for step in result.course] == [step.tokens for step in expected.course]
    for name in ("loss", "penalty"):
        values = [[getattr(step, name) for step in each.course] for each in (result, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-5)
    torch.testing.assert_close(weights(parted), weights(whole), atol=2e-5, rtol=0)


def test_the_gradient_of_parts_is_that_of_the_whole_batch(model, rows):
    taken = []

    def gradient(parts: int) -> torch.Tensor:
        trainee = copy.deepcopy(model)
        first = next(trainee.parameters())
        hook = first.register_post_accumulate_grad_hook(lambda p: taken.append(p.grad.clone()))
        config = settings(batch_size=12, gradient_accumulation=parts)
        train_locally(trainee, rows, config=config, seed=3, proximal_mu=20.0, steps=1)
        hook.remove()
        return taken.pop()  # after the last part, before the clipping

    torch.testing.assert_close(gradient(6), gradient(1), atol=1e-7, rtol=1e-5)


def test_recomputed_activations_give_the_same_bytes(model, rows):
    kept, recomputed = model, copy.deepcopy(model)
    train_locally(kept, rows, config=settings(), seed=1, steps=4)
    train_locally(recomputed, rows, config=settings(gradient_checkpointing=True), seed=1, steps=4)
    assert torch.equal(weights(kept), weights(recomputed))
    assert not recomputed.is_activation_checkpointing
    assert not recomputed.get_input_embeddings()._forward_hooks


def test_bf16_computes_in_bf16_and_keeps_the_weights_in_fp32(model, rows):
    half, whole, seen = model, copy.deepcopy(model), []
    hook = half.lm_head.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    result = train_locally(half, rows, config=settings(precision="bf16"), seed=0, steps=1)
    hook.remove()
    expected = train_locally(whole, rows, config=settings(), seed=0, steps=1)
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert result.loss == pytest.approx(expected.loss, rel=1e-2)
    assert result.loss != expected.loss
    assert half(input_ids=torch.tensor([[1, 2]])).logits.dtype == torch.float32  # nothing of it stays on the model


def test_a_device_without_bf16_is_told_before_any_step(model, rows, monkeypatch):
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "An Old Card")
    with pytest.raises(TrainingError, match=r"An Old Card .* precision: fp32"):
        train_locally(model, rows, config=settings(precision="bf16"), seed=0, steps=1)


def test_a_context_shorter_than_max_tokens_is_refused(model, rows):
    model.config.max_position_embeddings = 255
    with pytest.raises(TrainingError, match=r"max_tokens: got 256; .* 255"):
        train_locally(model, rows, config=settings(), seed=0)


def test_steps_of_a_round_are_passes_over_the_rows_or_a_number():
    assert steps_per_round(10, settings(batch_size=4, local_epochs=3)) == 9  # 4 + 4 + 2 rows, three times
    assert steps_per_round(10, settings(batch_size=4, local_epochs=3, local_steps=7)) == 7
    assert steps_per_round(1, settings(batch_size=4, local_epochs=1)) == 1


def test_the_schedule_is_that_of_the_whole_run():
    def course(**changes):
        config = settings(learning_rate=1.0, **changes)
        return [round(learning_rate(step, 8, config), 6) for step in range(8)]

    assert course() == [1.0] * 8
    assert course(warmup_share=0.5) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert course(schedule="linear") == [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert course(schedule="linear", warmup_share=0.2) == pytest.approx(  # ⌈1.6⌉ = 2 steps rise, 6 fall
        [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], abs=1e-6
    )
    assert learning_rate(3, 30, settings(learning_rate=1.0, warmup_share=0.1)) == 1.0
    assert learning_rate(2, 30, settings(learning_rate=1.0, warmup_share=0.1, schedule="linear")) == 1.0
    assert learning_rate(1, 30, settings(learning_rate=1.0, warmup_share=0.1)) == pytest.approx(2 / 3)
    half_wave = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert course(schedule="cosine") == pytest.approx(half_wave, abs=1e-6)


def test_a_schedule_goes_on_in_the_next_call():
    # The gradient is (1, −1), so each of AdamW's steps moves w₁ down by exactly its learning rate.
    config = settings(learning_rate=0.8, schedule="linear", warmup_share=0.25)
    whole, pieces, place = TwoParameters(), TwoParameters(), [0.0]
    course = train_locally(whole, [row(1, 2)], config=config, seed=0, steps=8).course
    rates = []
    for first, steps in ((0, 3), (3, 1), (4, 4)):
        part = train_locally(
            pieces, [row(1, 2)], config=config, seed=first, steps=steps, first_step=first, total_steps=8
        )
        rates += [step.learning_rate for step in part.course]
        place.append(-pieces.w[0].item())
    assert rates == [step.learning_rate for step in course]
    assert rates == pytest.approx([0.4, 0.8, 0.8, 4 / 6, 3.2 / 6, 0.4, 1.6 / 6, 0.8 / 6])
    moved = [round(sum(rates[:3]), 6), round(sum(rates[:4]), 6), round(sum(rates), 6)]
    assert place[1:] == pytest.approx(moved, abs=1e-5)
    with pytest.raises(TrainingError, match="beyond a run of 8"):
        train_locally(pieces, [row(1, 2)], config=config, seed=0, steps=2, first_step=7, total_steps=8)


def test_rows_that_no_step_reached_do_not_count(model, rows):
    for steps, used in ((1, 5), (2, 10), (3, 12), (4, 12)):  # 12 rows at 5 a step
        result = train_locally(copy.deepcopy(model), rows, config=settings(batch_size=5), seed=0, steps=steps)
        assert (result.n_examples, result.steps) == (used, steps)


def test_the_loss_is_the_language_models_alone_and_penalty_is_apart(model, rows):
    before, tokens = evaluate_loss(model, rows, batch_size=len(rows))
    one_batch = settings(batch_size=len(rows))
    result = train_locally(model, rows, config=one_batch, steps=1, seed=0, proximal_mu=50.0)
    assert result.loss == pytest.approx(before, abs=1e-5)
    assert (result.tokens, result.n_examples, result.steps) == (tokens, 12, 1)


def test_same_seed_same_bytes_other_seed_other_order(model, rows):
    trainees = [copy.deepcopy(model) for _ in range(3)]
    for trainee, seed in zip(trainees, (7, 7, 8), strict=True):
        torch.rand(seed)  # whatever was drawn before must not matter
        train_locally(trainee, rows, config=settings(local_epochs=2), seed=seed)
    same, again, other = map(weights, trainees)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_seeds_of_rounds_and_clients_differ():
    grid = [(seed, server_round, client) for seed in range(3) for server_round in range(6) for client in range(6)]
    assert len({derive_seed(*cell) for cell in grid}) == len(grid)
    assert all(0 <= derive_seed(*cell) < 2**32 for cell in grid)


def test_padding_keeps_the_real_end_of_text_where_it_is_also_the_padding():
    batch = pad_batch([row(5, EOS), row(5, 6, 7, EOS)])
    assert batch["labels"].tolist() == [[5, EOS, IGNORED, IGNORED], [5, 6, 7, EOS]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_the_end_of_text_is_learnt(model):
    texts = [row(11, EOS), row(21, 22, 23, EOS)]
    train_locally(model, texts, config=settings(learning_rate=5e-3), steps=30, seed=0)
    for text in texts:
        logits = model(input_ids=torch.tensor([text["input_ids"][:-1]])).logits
        assert logits[0, -1].argmax().item() == EOS


def test_rows_without_a_predicted_token_do_not_count(model):
    silent = row(4, 5, 6, labels=[4, IGNORED, IGNORED])  # a row's first token is never predicted
    result = train_locally(model, [row(1, 2, 3), silent], config=settings(local_epochs=2), seed=0)
    assert (result.n_examples, result.tokens, result.steps) == (1, 4, 2)  # 2 predicted tokens × 2 epochs
    with pytest.raises(TrainingError, match="none of the 1 rows"):
        train_locally(model, [silent], config=settings(local_epochs=1), seed=0)


def test_a_loss_that_is_not_finite_stops_with_its_step():
    class Exploding(TwoParameters):
        def forward(self, **inputs):
            return SimpleNamespace(loss=(self.w[0] - self.w[1]) * (1.0 if self.w[0] > -1.5 else math.inf))

    with pytest.raises(TrainingError, match="step 3 of 4: the loss is -inf"):  # w₁ falls by 1 a step
        train_locally(Exploding(), [row(1, 2)], config=settings(learning_rate=1.0), steps=4, seed=0)


def test_a_frozen_model_is_refused(model, rows):
    model.requires_grad_(False)
    with pytest.raises(TrainingError, match="frozen"):
        train_locally(model, rows, config=settings(local_epochs=1), seed=0)


def test_a_tied_head_is_trained_once(model):
    assert "lm_head.weight" not in trained_parameters(model)
    assert "model.embed_tokens.weight" in trained_parameters(model)


def test_it_leaves_no_trace(model, rows, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    threads, config = torch.get_num_threads(), model.config.to_dict()
    train_locally(model, rows, config=settings(torch_threads=2), steps=1, seed=0)
    assert list(tmp_path.iterdir()) == []
    assert "".join(capfd.readouterr()) == ""
    assert (torch.get_num_threads(), model.config.to_dict(), model.training) == (threads, config, False)
    assert all(p.grad is None for p in model.parameters())


def test_the_evaluated_loss_weighs_every_token_alike(model, rows):
    one, tokens = evaluate_loss(model, rows, batch_size=1)
    many, _ = evaluate_loss(model, rows, batch_size=5)
    assert tokens == sum(len(each["input_ids"]) - 1 for each in rows)
    assert one == pytest.approx(many, abs=1e-5)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert evaluate_loss(model, rows, batch_size=5)[0] == pytest.approx(math.log(300), abs=1e-5)  # all tokens alike
    assert math.isnan(evaluate_loss(model, [], batch_size=5)[0])
