"""The step loop: counters, cancel, errors, records, and what it frees."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

from decoding import DraftscopeError, Generation, Run, Settings, UsageError, generate, load_target, stream
from decoding.engine import in_turns
from decoding.metrics import measure
from decoding.records import TreeShape
from decoding.target import Target
from decoding.tree import TreePool, ancestor_mask
from heads import load_head
from tests.stubs import TableHead, TableTarget, untrained_head

GOLDEN = Path(__file__).parent.parent / "golden"
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def head(tiny_target):
    return load_head(str(GOLDEN / "hass_tiny" / "head_mid"), tiny_target)


def test_the_record_tells_what_happened(tiny_target, head, tmp_path) -> None:
    run = generate(tiny_target, head, PROMPT, Settings(max_new_tokens=50))
    assert run.head == "head_mid" and run.method == "eagle" and run.finish_reason == "length"
    assert len(run.output_ids) == 50 and run.prompt_ids == PROMPT
    assert run.settings.tree == TreeShape()
    context = len(PROMPT)
    for step in run.steps:
        assert step.context_length == context
        context += 1 + len(step.accepted)
        assert step.status.count("accepted") == len(step.accepted)
        # children of accepted nodes and of the root were compared, the others were not
        for node, status in enumerate(step.status):
            parent = step.parents[node]
            assert (status == "unreached") == (parent >= 0 and step.status[parent] != "accepted")
        for node, probability in enumerate(step.target_probs):
            assert 0 <= probability <= 1 and step.draft_logprobs[node] <= 0
        assert min(step.margins) >= 0 and step.draft_ms > 0 and step.verify_ms > 0
    assert [step.start_ms for step in run.steps[1:]] == pytest.approx([step.end_ms for step in run.steps[:-1]])
    figures = measure(run)
    assert figures.mean_acceptance_length == 1 + sum(len(step.accepted) for step in run.steps) / len(run.steps)
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run


def test_runs_in_turns_are_what_they_are_alone(tiny_target, head) -> None:
    settings = {name: Settings(max_new_tokens=tokens) for name, tokens in (("short", 5), ("long", 40))}
    runs = {(name, own): Generation(tiny_target, own, PROMPT, told) for name, told in settings.items() for own in (None, head)}
    order = [key for key, _ in in_turns(runs, turn=2)]
    assert order[:8] == [key for key in runs for _ in range(2)][: len(order[:8])]
    for (name, own), run in runs.items():
        assert run.run.output_ids == generate(tiny_target, own, PROMPT, settings[name]).output_ids
        assert run.run.steps[-1].end_ms < sum(other.run.steps[-1].end_ms for other in runs.values())


def test_at_a_tie_the_runner_up_is_the_other_token(tiny_target, head, monkeypatch) -> None:
    logits = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, features: logits(self, features).clamp(max=0.0))  # many are equal
    run = generate(tiny_target, head, PROMPT, Settings(max_new_tokens=30))
    ties = 0
    for step in run.steps:
        emitted = [*(step.node_ids[node] for node in step.accepted), step.bonus_id]
        assert not any(own == other for own, other in zip(emitted, step.runner_up_ids, strict=True))
        ties += sum(margin == 0 for margin in step.margins)
    assert ties > 20


def test_greedy_target_probabilities_are_softmax_at_the_parent(tiny_target, head) -> None:
    run = generate(tiny_target, head, PROMPT, Settings(max_new_tokens=12, tree_depth=2, tree_top_k=3, tree_nodes=6))
    ids = PROMPT + run.output_ids
    for step in run.steps:
        before = ids[: step.context_length + 1]
        for node, parent in enumerate(step.parents):
            path = before if parent < 0 else [*before, step.node_ids[parent]]
            with torch.inference_mode():
                wanted = torch.softmax(tiny_target.model(torch.tensor([path])).logits[0, -1], -1)[step.node_ids[node]]
            assert step.target_probs[node] == pytest.approx(wanted.item(), abs=1e-5)


def test_drift_is_recorded_where_it_is_asked_for(tiny_target, head) -> None:
    plain = generate(tiny_target, head, PROMPT, Settings(max_new_tokens=20))
    assert all(not step.overlap for step in plain.steps)
    generation = Generation(tiny_target, head, PROMPT, Settings(max_new_tokens=20), drift=True)
    for step in generation:
        places = 1 + len(step.accepted)
        assert len(step.overlap) == len(step.drift_cosine) == len(step.drift_distance) == places
        assert step.overlap[0] is not None and 0 < step.overlap[0] <= 1.0001 and -1 <= step.drift_cosine[0] <= 1.0001
        if len(step.accepted) == 6:
            assert step.overlap[6] is None, "the head drafts nothing below the last level"
    assert generation.run.output_ids == plain.output_ids


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancel_stops_within_one_step_and_keeps_what_was_made(tiny_target, head, after: int) -> None:
    done = []
    generation = Generation(tiny_target, head, PROMPT, Settings(max_new_tokens=60), cancelled=lambda: len(done) >= after)
    for step in generation:
        done.append(step)
    assert len(done) == after
    run = generation.run
    assert run.finish_reason == "cancelled" and run.steps == done
    assert Run.from_json(run.to_json()) == run


def test_closing_the_stream_cancels_and_frees(tiny_target, head) -> None:
    generation = Generation(tiny_target, head, PROMPT, Settings(max_new_tokens=60))
    steps = iter(generation)
    next(steps)
    cache = weakref.ref(generation._cache)
    session = weakref.ref(generation._session)
    steps.close()
    gc.collect()
    assert cache() is None and session() is None
    assert generation.run.finish_reason == "cancelled" and len(generation.run.steps) == 1


def test_the_clock_stands_still_while_the_step_is_held(tiny_target) -> None:
    import time

    steps = []
    for step in stream(tiny_target, None, PROMPT, Settings(max_new_tokens=6)):
        steps.append(step)
        time.sleep(0.05)
    assert steps[-1].end_ms - steps[0].start_ms < 200


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "empty"),
        ("hello", {}, "has no tokenizer"),
        ([1, 2, 999], {}, "token id 999 is outside the vocabulary"),
        (list(range(200)) * 6, {}, "the prompt has 1200 tokens, the context of tiny_base holds 1024"),
        ([1], {"tree_nodes": 100, "tree_top_k": 2, "tree_depth": 3}, "tree_nodes 100 is more than the 10 candidates"),
    ],
)
def test_bad_requests_are_refused_before_any_work(tiny_target, head, prompt, settings, message) -> None:
    with pytest.raises(UsageError, match=message):
        Generation(tiny_target, head, prompt, Settings(**settings))


def test_top_k_beyond_the_draft_vocabulary_is_refused(tiny_target) -> None:
    small = untrained_head(tiny_target, draft_vocab=torch.arange(5))
    with pytest.raises(UsageError, match="tree_top_k 10 is more than the 5 tokens"):
        generate(tiny_target, small, PROMPT, Settings())


def test_unset_tree_fields_take_the_heads_own() -> None:
    target = TableTarget(6)
    head = TableHead(target, lambda logits: logits.topk(2).indices.tolist())
    assert Generation(target, head, [1], Settings()).settings.tree == (3, 8, 64)
    assert Generation(target, head, [1], Settings(tree_depth=2, tree_nodes=9)).settings.tree == (2, 8, 9)
    assert Generation(target, head, [1], Settings(tree_top_k=2)).settings.tree == (3, 2, 10)


def test_logits_that_are_no_numbers_end_the_run_with_a_message(tiny_target, head) -> None:
    target = load_target(str(GOLDEN / "tiny_base"), device="cpu", dtype="float32")
    generation = Generation(target, None, PROMPT, Settings(max_new_tokens=5))
    with torch.inference_mode():
        target.lm_head.weight[7] = torch.nan
    with pytest.raises(DraftscopeError, match="not numbers"):
        list(generation)
    assert generation.run.finish_reason == "error" and "not numbers" in generation.run.error


def test_a_head_that_overflows_ends_the_run_with_a_message(tiny_target) -> None:
    broken = untrained_head(tiny_target)
    broken.lm_head = lambda features: features.new_full((len(features), tiny_target.vocab_size), torch.nan)
    with pytest.raises(DraftscopeError, match="head untrained"):
        generate(tiny_target, broken, PROMPT, Settings(max_new_tokens=5))


def test_ties_keep_every_parent_and_the_lower_index() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        shape = TreeShape(5, 4, 30)
        pool = TreePool(shape)
        beam = 1
        numbers, scores = torch.full((1,), -1), torch.zeros(1)
        for _ in range(shape.depth):
            # few different values, and some nodes that are certain: a child then ties with its parent
            logits = torch.randint(0, 3, (beam, 9), generator=generator).float() * 200
            pool.add_level(logits, numbers, scores)
            _, numbers, scores, _ = pool.next_beam()
            beam = len(numbers)
        _, parents, depths, _, kept, _ = pool.keep()
        for node, parent in enumerate(parents.tolist()):
            assert parent < node and depths[node] == (depths[parent] if parent >= 0 else 0) + 1
            assert (parent >= 0) == (depths[node] > 1), "a kept node's parent is kept"
        assert len(kept) == 30


def test_ancestor_mask_is_ancestors_and_self() -> None:
    parents = [-1, -1, 0, 0, 1, 2, 5]
    mask = ancestor_mask(torch.tensor(parents), 5)
    for node, parent in enumerate(parents):
        seen, above = {0, node + 1}, parent
        while above >= 0:
            seen.add(above + 1)
            above = parents[above]
        assert set(mask[node + 1].nonzero()[:, 0].tolist()) == seen
    assert mask[0].nonzero().tolist() == [[0]]


def test_plain_decoding_has_steps_without_nodes(tiny_target) -> None:
    run = generate(tiny_target, None, PROMPT, Settings(max_new_tokens=9))
    assert run.head is None and run.method == "autoregressive" and len(run.steps) == 8
    assert all(step.node_ids == [] and len(step.token_ids) == 1 for step in run.steps)
    assert measure(run).mean_acceptance_length == 1.0
    assert json.loads(run.to_json())["schema"] == "draftscope.run/1"
