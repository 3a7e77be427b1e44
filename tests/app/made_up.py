"""Made-up runs: as long and as wide as a page must bear, with no model behind them."""

from decoding.records import AUTOREGRESSIVE, Environment, HeadInfo, Run, Settings, Step

STEPS, NODES = 200, 60
# 60 nodes on 6 levels: ten below the root, then ever fewer
PARENTS = [-1] * 10 + [node // 2 for node in range(20)] + [10 + node // 2 for node in range(20)] + [30] * 4 + [50] * 3 + [54] * 3
PATH = [0, 10]
TIMES = {"verify_ms": 20.0, "accept_ms": 0.5, "commit_ms": 0.1, "record_ms": 0.4}


def depths_of(parents: list[int]) -> list[int]:
    """Depth of each node, 1 = child of the root."""
    out: list[int] = []
    for parent in parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out


def long_run(head: str | None) -> Run:
    """200 steps; with a head, every step has a tree and accepts two nodes."""
    nodes = NODES if head else 0
    parents, path = PARENTS[:nodes], PATH if head else []
    depths = depths_of(parents)
    reached = {-1, *path}
    status = ["accepted" if n in path else "rejected" if parents[n] in reached else "unreached" for n in range(nodes)]
    steps, root, clock = [], 0, 5.0
    for index in range(STEPS):
        ids = [(index + node) % 250 for node in range(nodes)]
        bonus = (7 * index) % 250
        step = Step(
            index=index,
            root_id=root,
            node_ids=ids,
            parents=parents,
            depths=depths,
            draft_logprobs=[-1.0] * nodes,
            scores=[-float(depth) for depth in depths],
            target_probs=[0.4] * nodes,
            status=status,
            accepted=path,
            bonus_id=bonus,
            token_ids=[*(ids[node] for node in path), bonus],
            start_ms=clock,
            draft_ms=4.0 if head else 0.0,
            context_length=1 + index * (len(path) + 1),
            **TIMES,
        )
        steps.append(step)
        clock, root = step.end_ms, bonus
    return Run(
        target="made up",
        head=head,
        method="hass" if head else AUTOREGRESSIVE,
        head_info=HeadInfo(method="hass", layers=1, parameters=1, draft_vocab_size=1) if head else None,
        settings=Settings(tree_nodes=NODES, max_new_tokens=1 + STEPS * (len(path) + 1)),
        environment=Environment(device="cpu", dtype="float32", threads=1),
        prompt_ids=[1],
        prefill_ms=5.0,
        first_id=0,
        steps=steps,
        output_ids=[0, *(token for step in steps for token in step.token_ids)],
        text="",
        token_texts={token: f" word{token}" for token in range(250)},
        finish_reason="length",
    )
