"""The registry: which targets and heads are offered where, and changing targets."""

import gc
import json
import shutil
import weakref
from pathlib import Path

import pytest

from app import offers
from app.models import Models
from app.offers import head_offers, target_offers
from decoding import DraftscopeError, UsageError, generate, loading, tuned
from decoding.errors import Stopped
from decoding.known import catalogue
from decoding.memory import described, needs
from decoding.records import Settings
from decoding.tuning import _key as key_of_head
from tests.app.tiny import GOLDEN

BASE = str(GOLDEN / "tiny_base")
MEDUSA = str(GOLDEN / "medusa_tiny")
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Says how much memory there is."""

    def have(cpu: float, *gpus: float, disk: float = 1000.0) -> None:
        monkeypatch.setattr(offers, "cpu_bytes", lambda: int(cpu * 1e9))
        monkeypatch.setattr(offers, "gpu_bytes", lambda: tuple(int(size * 1e9) for size in gpus))
        monkeypatch.setattr(offers, "_free_disk", lambda: int(disk * 1e9))
        monkeypatch.setattr(offers, "_computes_in_half", lambda: True)

    return have


def found(source: str, **asked: str) -> offers.TargetOffer:
    return next(offer for offer in target_offers("embedded", **asked) if offer.source == source)


def test_what_does_not_fit_is_greyed_out_with_the_reason(machine) -> None:
    machine(16)
    assert found("embedded").reason is None
    assert found("lmsys/vicuna-7b-v1.3").reason is None
    told = "needs 29.1 GB of memory, this machine has 16.0 GB of CPU memory; would fit: a GPU with --dtype 4bit (13.5 GB)"
    assert found("lmsys/vicuna-13b-v1.3").reason == told
    assert found("lmsys/vicuna-7b-v1.3", dtype="float32").reason.endswith("would fit: --dtype bfloat16 (15.6 GB)")
    machine(16, disk=5)
    assert found("lmsys/vicuna-7b-v1.3").reason == "is 13.5 GB to fetch, the disk has 5.0 GB free"


def test_several_gpus_and_the_cpus_memory_count(machine) -> None:
    machine(64, 24)
    assert found("meta-llama/Meta-Llama-3-8B-Instruct").note == ""
    assert found("lmsys/vicuna-13b-v1.3").note == "partly in the CPU's memory: slow"
    assert found("lmsys/vicuna-13b-v1.3", device="cuda:0").reason.endswith("would fit: --dtype 8bit (18.0 GB), --dtype 4bit (13.5 GB)")
    assert found("lmsys/vicuna-13b-v1.3", device="cuda:0", dtype="4bit").reason is None
    assert "24.0 GB on GPUs and 64.0 GB of CPU memory" in found("meta-llama/Meta-Llama-3-70B-Instruct").reason
    machine(64, 80, 80)
    assert found("meta-llama/Meta-Llama-3-70B-Instruct").note == "several GPUs"


def test_a_space_serves_its_own_target(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1000)
    monkeypatch.setenv("SPACE_ID", "someone/draftscope")
    assert [offer.source for offer in target_offers("embedded") if offer.reason is None] == ["embedded"]
    with pytest.raises(UsageError, match="this server offers embedded"):
        Models().check("lmsys/vicuna-7b-v1.3", ["autoregressive"])


def test_heads_belong_to_the_target_they_were_made_for(machine) -> None:
    machine(1000)
    assert [offer.source for offer in head_offers("embedded")][:3] == ["autoregressive", "eagle", "hass"]
    vicuna = [offer.source for offer in head_offers("lmsys/vicuna-7b-v1.3")]
    assert vicuna == ["autoregressive", "yuhuili/EAGLE-Vicuna-7B-v1.3", "FasterDecoding/medusa-vicuna-7b-v1.3"]
    assert [offer.source for offer in head_offers("/models/vicuna-7b-v1.3")] == vicuna, "a folder is known by its name"
    with pytest.raises(UsageError, match="unknown method 'hass'"):
        Models().check("lmsys/vicuna-7b-v1.3", ["autoregressive", "hass"])


def test_memory_is_computed_from_a_targets_sizes(tmp_path: Path) -> None:
    entry = catalogue().target("meta-llama/Llama-2-7b-chat-hf")
    found = needs(entry, "bfloat16")
    assert found.weights == 2 * 6738415616
    assert found.cache == (4096 + 60) * 32 * 2 * 32 * 128 * 2, "keys and values of every layer, and room for a tree"
    assert found.head == pytest.approx(2 * (2 * 4096**2 + 4 * 4096**2 + 3 * 4096 * 11008) + 4156 * 2 * 4096 * 2, rel=0.01)
    assert needs(entry, "bfloat16", context=1000).cache < found.cache / 3 and needs(entry, "4bit").weights < found.weights / 2
    for known in catalogue().targets:  # what the sizes give is what the weights have
        config = {
            "hidden_size": known.hidden_size,
            "num_hidden_layers": known.layers,
            "vocab_size": known.vocab_size,
            "intermediate_size": known.intermediate_size,
            "max_position_embeddings": known.context_length,
            "num_attention_heads": known.hidden_size // known.head_dim,
            "num_key_value_heads": known.kv_heads,
            "head_dim": known.head_dim,
            "tie_word_embeddings": known.source == "embedded",
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert described(str(tmp_path)).parameters == pytest.approx(known.parameters, rel=1e-4), known.source
    (tmp_path / "config.json").write_text('{"hidden_size": "x"}')
    for source, message in ((str(tmp_path), "does not tell the sizes"), ("nobody/nothing", "not in the catalogue")):
        with pytest.raises(UsageError, match=message):
            described(source)


def test_every_entry_of_the_catalogue_stands_on_its_target() -> None:
    known = catalogue()
    sources = [target.source for target in known.targets]
    assert len(set(sources)) == len(sources) and sources[0] == "embedded"
    assert {head.target for head in known.heads} <= set(sources)
    assert {head.layout for head in known.heads} == {"eagle", "medusa-v1", "medusa-v2"}


def test_changing_the_target_frees_the_old_one() -> None:
    models = Models(BASE, "cpu", "float32")
    old = models.target(BASE)
    models.head(str(GOLDEN / "hass_tiny" / "head_mid"), old)
    watched = weakref.ref(old.model)
    del old
    assert models.target(MEDUSA).name == "medusa_tiny" and models.ready(MEDUSA) and not models.ready(BASE)
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("room", [True, False])
def test_a_target_that_can_not_be_loaded_leaves_the_old_one_working(room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(BASE, broken)
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:9000])
    models = Models(BASE, "cpu", "float32")
    wanted = generate(models.target(BASE), None, PROMPT, Settings(max_new_tokens=8)).output_ids
    monkeypatch.setattr(loading, "fits", lambda *_: room)
    with pytest.raises(DraftscopeError, match="can't be loaded"):
        models.target(str(broken))
    assert models.ready(BASE)
    head = models.head(str(GOLDEN / "hass_tiny" / "head_mid"), models.target(BASE))
    assert generate(models.target(BASE), head, PROMPT, Settings(max_new_tokens=8)).output_ids == wanted


@pytest.mark.parametrize("room", [True, False])
def test_a_load_that_is_stopped_leaves_the_old_target_working(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(BASE, "cpu", "float32")
    models.target(BASE)
    monkeypatch.setattr(loading, "fits", lambda *_: room)

    def stop(text: str, share: float | None) -> None:
        if text == "Reading medusa_tiny":
            raise Stopped

    with pytest.raises(Stopped):
        models.target(MEDUSA, stop)
    assert models.ready(BASE) and len(generate(models.target(BASE), None, PROMPT, Settings(max_new_tokens=8)).output_ids) == 8


def test_a_target_that_can_not_be_had_drops_nothing() -> None:
    models = Models(BASE, "cpu", "float32")
    old = models.target(BASE)
    with pytest.raises(UsageError, match="unknown target"):
        models.target("nowhere-at-all")
    assert models.target(BASE) is old


def test_trees_of_another_machine_are_chosen_anew_where_nobody_waits(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path))
    models = Models(BASE, "cpu", "float32", (str(GOLDEN / "hass_tiny" / "head_mid"), MEDUSA))
    assert not models.fit_trees(), "nothing is loaded"
    target = models.target(BASE)
    name, other = models.extra_heads
    head = models.head(name, target)
    _, device, dtype, threads, *network, _ = key_of_head(target, head).split(tuned.SEPARATOR)
    curve = [{"depth": 2, "top_k": 3, "nodes": nodes, "tau": tau, "ms_per_token": 1.0} for nodes, tau in ((2, 50.0), (8, 1.0))]
    facts = {"head": head.name, "target": target.name, "dtype": dtype, "threads": 2, "ms_per_token": 1.0, "plain_ms": 2.0}
    facts |= {"tau": 2.0, "verify_ms": {}, "draft_ms": {}, "depth": 2, "top_k": 3, "nodes": 8, "curve": curve}
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped.json")

    def ship(machine: str) -> None:
        key = tuned.SEPARATOR.join((machine, device, dtype, threads, *network, "7"))
        tuned.SHIPPED.write_text(json.dumps({key: {**facts, "machine": machine}}))

    ship(key_of_head(target, head).split(tuned.SEPARATOR)[0])
    assert not models.fit_trees(), "chosen on this kind of machine"
    models._drop()
    ship("another")
    target = models.target(BASE)
    head, before = models.head(name, target), models.head(other, target).tree
    assert head.tree == (2, 3, 8)
    steps = 1
    while models.fit_trees():
        steps += 1
    assert head.tree == (2, 3, 2) and steps > 10, "step by step"
    assert models.head(other, target).tree == before, "nothing is known of it"
    assert tuned.recall(key_of_head(target, head)).acceptance_from == "another" and not models.fit_trees()
    (tmp_path / "tuned.json").unlink()
    models._drop()
    models.target(BASE)
    assert models.fit_trees()
    gone = weakref.ref(models._target)
    models._drop()  # as for another target
    gc.collect()
    assert gone() is None and not models.fit_trees()
