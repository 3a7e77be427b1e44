"""Run records made by hand, for tests of everything that reads them."""

from typing import Any

from decoding.records import Run


def step_fields(index: int, root: int, path: list[int], bonus: int, context: int, **changes: Any) -> dict[str, Any]:
    """A step whose tree holds `path` (accepted) and one rejected sibling beside each of its nodes and below its end."""
    depths = [depth for depth in range(1, len(path) + 2) for _ in range(2)]
    depths = depths[:-1]  # below the end of the path: one node only
    parents = [-1 if depth == 1 else 2 * (depth - 2) for depth in depths]
    nodes = len(depths)
    accepted = [2 * place for place in range(len(path))]
    tokens = [path[place // 2] if place in accepted else 900 + place for place in range(nodes)]
    fields = {
        "index": index,
        "root_id": root,
        "node_ids": tokens,
        "parents": parents,
        "depths": depths,
        "draft_logprobs": [-0.5] * nodes,
        "scores": [-0.5 * depth for depth in depths],
        "target_probs": [0.25] * nodes,
        "status": ["accepted" if place in accepted else "rejected" for place in range(nodes)],
        "accepted": accepted,
        "bonus_id": bonus,
        "token_ids": [*path, bonus],
        "margins": [1.0] * (len(path) + 1),
        "runner_up_ids": [7] * (len(path) + 1),
        "context_length": context,
    }
    return fields | changes


def run_fields(paths: list[list[int]], *, emit_last: int | None = None, plain: bool = False, **changes: Any) -> dict[str, Any]:
    """A run with one step per entry of `paths`, each of which ends with a bonus token (its last entry).

    Every step takes 1 ms to draft, 4 to verify, 2 to accept, 0.5 to commit, 0.5 to record; the prefill 10 ms.

    Args:
        emit_last: tokens that the last step emits; None = all.
        plain: steps without nodes, as plain decoding makes them (each path holds its one token).
    """
    prompt, first, steps = [11, 12, 13], 5, []
    root, context, clock = first, len(prompt), 10.0
    for index, path in enumerate(paths):
        *accepted, bonus = path
        step = {"index": index, "root_id": root, "bonus_id": bonus, "token_ids": path, "context_length": context, "margins": [0.1]}
        if not plain:
            step = step_fields(index, root, accepted, bonus, context)
        times = {"start_ms": clock, "draft_ms": 0.0 if plain else 1.0, "verify_ms": 4.0, "accept_ms": 2.0, "commit_ms": 0.5}
        steps.append(step | times | {"record_ms": 0.5})
        root, context, clock = bonus, context + 1 + len(accepted), clock + (7.0 if plain else 8.0)
    if emit_last is not None:
        steps[-1] = steps[-1] | {"token_ids": steps[-1]["token_ids"][:emit_last]}
    fields = {
        "schema": "draftscope.run/1",
        "target": "tiny",
        "head": None if plain else "hass",
        "method": "autoregressive" if plain else "hass",
        "settings": {"max_new_tokens": 64},
        "environment": {"device": "cpu", "dtype": "float32", "threads": 1, "versions": {"torch": "2.13"}},
        "created": "2026-11-30T00:00:00+00:00",
        "prompt_ids": prompt,
        "prompt_text": "what?",
        "prefill_ms": 10.0,
        "first_id": first,
        "steps": steps,
        "output_ids": [first, *(token for step in steps for token in step["token_ids"])],
        "text": "déjà vu \U0001f333",
        "token_texts": {5: "dé", 11: "<0xE2>"},
        "finish_reason": "length",
    }
    return fields | changes


def make_run(paths: list[list[int]], **options: Any) -> Run:
    return Run.model_validate(run_fields(paths, **options))
