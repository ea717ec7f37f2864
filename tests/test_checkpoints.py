"""Every round's model on disk: it loads, it is finite, it is whole, also where the disk is full."""

import copy
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from small_federation import federate, final_bytes, settings, whole

from fedmem.models.loading import load_model
from fedmem.results.progress import KEPT, Progress
from fedmem.train.checkpoints import Checkpoints
from fedmem.train.history import History
from fedmem.train.in_process_grid import FederatedError

pytest_plugins = ["small_fixtures"]


def test_every_rounds_checkpoint_loads_and_is_that_rounds_model(model, train_sets, tokenizer, tmp_path):
    initial, config = copy.deepcopy(model), settings()
    federate(model, train_sets, config, tmp_path, tokenizer)
    source = str(tmp_path / "round-0")  # a folder like any model's
    probe = torch.tensor([[5, 9, 120, 44]])
    for server_round, expected in {0: initial, 2: model}.items():
        loaded, its_tokenizer = load_model(source, device="cpu", checkpoint=tmp_path / f"round-{server_round}")
        assert torch.equal(loaded(probe).logits, expected(probe).logits)
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
        assert its_tokenizer.get_vocab() == tokenizer.get_vocab()
        assert loaded.config.use_cache
    saved = load_file(tmp_path / "round-2" / "model.safetensors")
    assert "lm_head.weight" not in saved
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert final_bytes(tmp_path, 0) != final_bytes(tmp_path, 1) != final_bytes(tmp_path, 2)


def test_a_model_that_is_not_finite_is_never_saved(model, tokenizer, tmp_path):
    model.model.norm.weight.data[3] = float("nan")
    checkpoints = Checkpoints(tmp_path, model, tokenizer, {}, settings(), History())
    with pytest.raises(FederatedError, match=r"round 4: weights not finite: model.norm.weight"):
        checkpoints.save(4)
    assert list(tmp_path.iterdir()) == []


def test_a_round_is_put_back_bit_by_bit(model, train_sets, tokenizer, tmp_path):
    federate(model, train_sets, settings(), tmp_path, tokenizer)
    other = copy.deepcopy(model)
    checkpoints = Checkpoints(tmp_path, other, tokenizer, {}, settings(), History())
    checkpoints.load(1)
    checkpoints.save(3)
    assert final_bytes(tmp_path, 3) == final_bytes(tmp_path, 1) != final_bytes(tmp_path, 2)
    checkpoints.load(2)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_of_a_model_with_adapters_the_adapters_are_saved_every_round(model, train_sets, tokenizer, tmp_path):
    from fedmem.models import adapters

    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    config = settings(finetuning="lora", lora_rank=2, model=str(tmp_path / "base"), learning_rate=1e-2)
    adapted = adapters.add_adapters(model, config)
    federate(adapted, train_sets, config, tmp_path / "runs", tokenizer)
    first, last = ({path.name for path in (tmp_path / f"runs/round-{r}").iterdir()} for r in (0, 2))
    assert first == last >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert "model.safetensors" not in last
    probe = torch.tensor([[5, 9, 120, 44]])
    loaded, _ = load_model(config.model, device="cpu", checkpoint=tmp_path / "runs/round-2", merge=False)
    base, _ = load_model(config.model, device="cpu")
    assert torch.equal(loaded(probe).logits, adapted(probe).logits)
    assert not torch.allclose(loaded(probe).logits, base(probe).logits, atol=1e-3)
    Checkpoints(tmp_path / "runs", adapted, tokenizer, {}, config, History()).load(0)
    assert torch.equal(adapted(probe).logits, base(probe).logits)  # B is zero before training


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for two rounds and a half."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=260k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_stops_the_run_and_it_goes_on_once_there_is_room(
    new_model, train_sets, tokenizer, tmp_path, small_disk
):
    def again() -> Progress:  # as a new process finds it
        (small_disk / KEPT).mkdir(exist_ok=True)
        return Progress(small_disk, {"identity": "i", "code": "c"})

    federate(new_model(), train_sets, settings(rounds=3), tmp_path / "enough", tokenizer)
    size = sum(len(content) for content in whole(tmp_path / "enough/round-0").values())
    subprocess.run(["mount", "-o", f"remount,size={size * 5 // 2}", str(small_disk)], check=True)
    says = r"round 2: its checkpoint could not be written to .*round-2.*No space(.|\n)*Make room there"
    with pytest.raises(FederatedError, match=says):
        federate(new_model(), train_sets, settings(rounds=3), small_disk / "rounds", tokenizer, progress=again())
    assert again().value["rounds"] == {"rounds": 1}
    assert sorted(path.name for path in (small_disk / "rounds").iterdir()) == ["round-0", "round-1"]
    for server_round in ("round-0", "round-1"):
        assert whole(small_disk / "rounds" / server_round) == whole(tmp_path / "enough" / server_round)
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    federate(new_model(), train_sets, settings(rounds=3), small_disk / "rounds", tokenizer, progress=again())
    assert whole(small_disk / "rounds") == whole(tmp_path / "enough")


def test_a_folder_that_may_not_be_written_is_an_error_with_its_round(model, tokenizer, tmp_path):
    (tmp_path / "rounds").write_text("a file where a folder should be")
    checkpoints = Checkpoints(tmp_path / "rounds", model, tokenizer, {}, settings(), History())
    with pytest.raises(FederatedError, match="round 1: its checkpoint could not be written"):
        checkpoints.save(1)
