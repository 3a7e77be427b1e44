"""Every reference trace is reproduced in float32: the same nodes in the same order, parents, path, output and scores."""

import json
from pathlib import Path

import pytest
import torch

from decoding import Settings, generate, load_target
from decoding.accept import Draws
from heads import load_head

GOLDEN = Path(__file__).parent.parent / "golden"
TRACES = sorted(GOLDEN.glob("*_tiny/trace_*.json"))
# the weights of the head that made the eos trace are not published: its output is checked below, its trees can't be
FEATURE_TRACES = [path for path in TRACES if path.parent.name != "medusa_tiny" and path.stem != "trace_greedy_eos"]


class Injected(Draws):
    """The reference's own random numbers: acceptance draws in order, and its bonus tokens."""

    def __init__(self, uniforms: list[float], tokens: list[int]) -> None:
        self.uniforms, self.tokens = list(uniforms), list(tokens)

    def uniform(self) -> float:
        return self.uniforms.pop(0)

    def choose(self, weights: torch.Tensor) -> int:
        token = self.tokens.pop(0)
        assert weights[token] > 0, "the reference drew a token that has no probability here"
        return token


@pytest.fixture(scope="module")
def target():
    return load_target(str(GOLDEN / "tiny_base"), device="cpu", dtype="float32")


@pytest.mark.parametrize("path", FEATURE_TRACES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_trace(path: Path, target) -> None:
    trace = json.loads(path.read_text())
    params, reference = trace["params"], trace["steps"]
    head = load_head(str(path.parent / trace["head"]), target)
    settings = Settings(
        max_new_tokens=len(trace["output_ids"]) - len(trace["prompt_ids"]) + 1,
        temperature=params["temperature"],
        top_p=params["top_p"] or 1.0,
        top_k=params["sampling_top_k"],
        tree_depth=params["depth"] + 1,
        tree_top_k=params["top_k"],
        tree_nodes=params["total_token"] - 1,
        stop_token_ids=(),
    )
    draws = None
    if params["temperature"]:
        uniforms = [uniform for step in reference for uniform in step["uniforms"]]
        draws = Injected(uniforms, [reference[0]["sample_token"], *(step["bonus_token"] for step in reference)])
    run = generate(target, head, trace["prompt_ids"], settings, draws=draws)

    assert len(run.steps) == len(reference)
    for step, wanted in zip(run.steps, reference, strict=True):
        assert step.root_id == wanted["sample_token"]
        assert step.context_length == wanted["input_len"]
        assert step.node_ids == wanted["draft_tokens"][1:]
        assert [parent + 1 for parent in step.parents] == wanted["parents"][1:]
        assert step.depths == wanted["tree_position_ids"][1:]
        assert step.scores == pytest.approx(wanted["node_scores"][1:], abs=1e-4)
        assert [node + 1 for node in step.accepted] == wanted["accepted_nodes"][1:]
        assert step.bonus_id == wanted["bonus_token"]
        if params["temperature"]:
            assert [draw for draw in step.draws if draw is not None] == wanted["uniforms"]
    # the reference returns prompt + accepted tokens; the token that the last step adds (its bonus) is one more of ours
    assert trace["prompt_ids"] + run.output_ids == trace["output_ids"] + [reference[-1]["bonus_token"]]


def test_all_traces_are_here() -> None:
    assert len(TRACES) >= 10


@pytest.mark.parametrize("name", ["head_mid", "head_weak"])
def test_stop_token_ends_the_output_exactly(target, name: str) -> None:
    trace = json.loads((GOLDEN / "hass_tiny" / "trace_greedy_eos.json").read_text())
    head = load_head(str(GOLDEN / "hass_tiny" / name), target)
    stop = trace["params"]["eos_token_id"]
    new = trace["output_ids"][len(trace["prompt_ids"]) :]
    run = generate(target, head, trace["prompt_ids"], Settings(max_new_tokens=200, stop_token_ids=(stop,)))
    assert stop in new, "the trace was made to stop"
    assert run.output_ids == new[: new.index(stop) + 1]
    assert run.finish_reason == "stop"


def test_medusa_trace() -> None:
    folder = GOLDEN / "medusa_tiny"
    target = load_target(str(folder), device="cpu", dtype="float32")
    head = load_head(str(folder), target)
    trace = json.loads((folder / "trace_greedy_mc63_p0.json").read_text())
    new = trace["output_ids"][len(trace["prompt_ids"]) :]
    run = generate(target, head, trace["prompt_ids"], Settings(max_new_tokens=len(new) + 1, stop_token_ids=()))
    assert [list(path) for path in head.choices] == trace["medusa_choices"]
    paths = sorted(trace["medusa_choices"], key=lambda path: (len(path), path))
    assert len(run.steps) == len(trace["steps"])
    for step, wanted in zip(run.steps, trace["steps"], strict=True):
        assert [step.root_id, *step.node_ids] == wanted["tree_candidates"]
        assert step.depths == [len(path) for path in paths]
        assert step.parents == [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]
        assert step.node_ids == [wanted["head_topk"][len(path) - 1][path[-1]] for path in paths]
        assert len(step.accepted) == wanted["accept_length"]
        assert [step.root_id, *(step.node_ids[node] for node in step.accepted)] == wanted["accepted_tokens"]
    assert run.output_ids[: len(new)] == new
