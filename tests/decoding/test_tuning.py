"""Tree settings that fit the machine: one wide record tells what smaller trees would have accepted."""

import json
from pathlib import Path

import pytest

from decoding import Settings, UsageError, generate, tuning
from decoding import tuned as kept
from decoding.cli import main
from decoding.costs import verification
from decoding.records import TreeShape
from decoding.tuning import ROWS, _key, choose, finalists, fit, line, reaches, rising, tune, tuned_for, winner
from heads import load_head
from heads.catalogue import catalogue
from tests.conftest import GOLDEN

TREE = {"tree_depth", "tree_top_k", "tree_nodes"}
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path))


def settings(shape: TreeShape, tokens: int) -> Settings:
    return Settings(max_new_tokens=tokens, tree_depth=shape.depth, tree_top_k=shape.top_k, tree_nodes=shape.nodes, stop_token_ids=())


@pytest.mark.parametrize("name", ["hass_tiny/head_mid", "eagle2_tiny/head_bias", "medusa_tiny"])
def test_a_wide_record_tells_what_smaller_trees_accept(name: str, tiny_target) -> None:
    head = load_head(str(GOLDEN / name), tiny_target)
    order = getattr(head, "choices", None)
    wide = TreeShape(4, 10, len(order)) if order else TreeShape(5, 6, TreeShape(5, 6).pool)
    run = generate(tiny_target, head, PROMPT, settings(wide, 30))
    ids, told = [*PROMPT, run.first_id], []
    for step in run.steps:
        for shape in (TreeShape(5, 6, 20), TreeShape(3, 2, 5), TreeShape(4, 3, 9), TreeShape(2, 6, 12), TreeShape(1, 1, 1)):
            small = generate(tiny_target, head, ids[:-1], settings(shape, 8)).steps[0]
            if small.root_id == ids[-1]:
                wanted = sum(rank <= shape.nodes for rank in reaches(step, shape.top_k, shape.depth, order))
                assert len(small.accepted) == wanted
                told.append(wanted)
        ids += step.token_ids
    assert len(told) > 20 and max(told) > 0


def test_the_choice_is_the_least_time_per_token() -> None:
    assert line({1: 10.0, 3: 30.0}, 2) == 20.0 and line({1: 10.0}, 1) == 10.0

    class Played:
        parents, depths, scores = [-1, -1, 0, 1], [1, 1, 2, 2], [-0.1, -1.0, -0.2, -2.0]

        def __init__(self, accepted: list[int]) -> None:
            self.accepted = accepted

    steps = [Played([0, 2])] * 3 + [Played([1])] + [Played([])] * 4
    cheap = dict.fromkeys((1, 2, 3, 4, 5), 10.0)
    point, curve = choose(steps, cheap, {(1, 2): 1.0, (2, 2): 2.0})
    # nodes by score: 0, its child 2, then 1: all three and depth 2 give (3 * 2 + 1) / 8 accepted; node 4 adds nothing
    assert (point["nodes"], point["depth"], point["tau"]) == (3, 2, 1 + 7 / 8)
    assert point["ms_per_token"] == pytest.approx(12 / point["tau"])
    assert [round(8 * (one["tau"] - 1)) for one in curve] == [3, 6, 7, 7]
    steep = {rows: 10.0 * rows for rows in cheap}
    assert choose(steps, steep, {(1, 2): 1.0, (2, 2): 2.0})[0]["nodes"] == 1


def test_the_best_trees_of_different_sizes_are_run_against_each_other() -> None:
    curve = [{"depth": 2, "top_k": 4, "nodes": n, "ms_per_token": abs(n - 10) + 20.0} for n in range(1, 40)]
    assert [tree.nodes for tree in finalists(curve)] == [10, 7, 14, 5]
    measured = ((1.6, 20.0, 3), (2.0, 20.9, 9), (2.0, 20.5, 7), (2.4, 21.1, 12))
    finals = [{"tau": tau, "ms_per_token": ms, "nodes": nodes} for tau, ms, nodes in measured]
    assert winner(finals)["tau"] == 2.0, "5 % is noise, more is not"
    assert winner(finals)["nodes"] == 9, "as fast, and it can catch more"


def test_more_rows_never_cost_less() -> None:
    assert rising({8: 5.0, 1: 3.0, 2: 9.0, 4: 4.0}) == {1: 3.0, 2: 4.0, 4: 4.0, 8: 5.0}


def test_tune_is_remembered_for_this_head_and_hand_set_values_win(tiny_target, capsys, tmp_path) -> None:
    folder = str(GOLDEN / "hass_tiny" / "head_mid")
    head = load_head(folder, tiny_target)
    assert tuned_for(tiny_target, head) is None and head.tree == TreeShape()
    prompts = [type("Prompt", (), {"text": PROMPT})()]
    tuned = tune(tiny_target, head, prompts, max_new_tokens=12)
    assert {1, *ROWS} <= tuned.verify_ms.keys() and min(tuned.draft_ms.values()) > 0
    assert 0 < tuned.ms_per_token == winner(tuned.finals)["ms_per_token"]
    assert tuned.plain_ms > 0
    for final in tuned.finals:  # what was run is what these settings give
        shape = TreeShape(*(final[name] for name in ("depth", "top_k", "nodes")))
        own = generate(tiny_target, head, PROMPT, Settings(max_new_tokens=12, **settings(shape, 1).model_dump(include=TREE)))
        assert final["tau"] == sum(len(step.token_ids) for step in own.steps) / len(own.steps)
    again = load_head(folder, tiny_target)
    assert again.tree == tuned.tree and tuned_for(tiny_target, again) == tuned
    assert load_head(folder, tiny_target, draft_vocab=120).tree == TreeShape(), "another head: never tuned"
    run = generate(tiny_target, again, PROMPT, Settings(max_new_tokens=5, tree_depth=2, tree_top_k=2, tree_nodes=3))
    assert run.settings.tree == (2, 2, 3)
    (tmp_path / "tuned.json").write_text("{broken")
    assert tuned_for(tiny_target, head) is None


def test_a_machine_that_tuned_nothing_takes_the_shipped_choice_for_its_dtype(tiny_target, tmp_path, monkeypatch) -> None:
    folder = str(GOLDEN / "hass_tiny" / "head_mid")
    head = load_head(folder, tiny_target)
    here = _key(tiny_target, head)
    _, device, _, _, *network, tokens_seen = here.split(kept.SEPARATOR)
    assert tokens_seen == str(head.info.tokens_seen)
    facts = {"head": head.name, "target": tiny_target.name, "machine": "another", "dtype": "-", "threads": 96}
    facts |= {"ms_per_token": 1.0, "plain_ms": 2.0, "tau": 2.0, "verify_ms": {}, "draft_ms": {}}
    trees = {"float32": {"depth": 2, "top_k": 2, "nodes": 3}, "bfloat16": {"depth": 4, "top_k": 4, "nodes": 20}}
    shipped = {kept.SEPARATOR.join(("another", device, dtype, "96", *network, "1234")): {**facts, **tree} for dtype, tree in trees.items()}
    (tmp_path / "shipped.json").write_text(json.dumps(shipped))
    monkeypatch.setattr(kept, "SHIPPED", tmp_path / "shipped.json")
    assert load_head(folder, tiny_target).tree == TreeShape(2, 2, 3)
    kept.remember(here, kept.Tuned(**facts, depth=1, top_k=2, nodes=2))
    assert load_head(folder, tiny_target).tree == TreeShape(1, 2, 2), "its own comes first"


def test_what_trees_catch_elsewhere_and_what_they_cost_here_choose_in_seconds(tiny_target, tmp_path, monkeypatch, capsys) -> None:
    folder = str(GOLDEN / "hass_tiny" / "head_mid")
    head = load_head(folder, tiny_target)
    with pytest.raises(UsageError, match="measured nowhere"):
        fit(tiny_target, head)
    here = _key(tiny_target, head)
    _, device, dtype, _, *network, _ = here.split(kept.SEPARATOR)
    taus = {2: 1.6, 3: 9.0, 4: 2.0, 8: 2.02, 15: 2.5, 23: 3.0}  # no tree of 3 nodes is tried
    curve = [{"depth": 2, "top_k": 5, "nodes": nodes, "tau": tau, "ms_per_token": 1.0} for nodes, tau in taus.items()]
    facts = {"head": head.name, "target": tiny_target.name, "machine": "a Xeon", "dtype": "bfloat16", "threads": 96}
    facts |= {"ms_per_token": 1.0, "plain_ms": 2.0, "tau": 2.0, "verify_ms": {}, "draft_ms": {}, "depth": 2, "top_k": 5, "nodes": 15}
    other = kept.SEPARATOR.join(("a Xeon", "cpu", "bfloat16", "96", *network, "1234"))
    same = kept.SEPARATOR.join(("a Xeon", device, dtype, "96", *network, "99"))
    wrong = [{**point, "tau": 50.0 * point["nodes"]} for point in curve]
    monkeypatch.setattr(kept, "SHIPPED", tmp_path / "shipped.json")

    def ship(**choices: dict) -> None:
        named = {"other": other, "same": same}
        (tmp_path / "shipped.json").write_text(json.dumps({named[name]: {**facts, **told} for name, told in choices.items()}))

    tried = []

    def going(target, head, tree=None):
        tried.append(tree.nodes if tree else 0)
        return iter([type("Step", (), {"total_ms": float(10 * (tree.nodes + 1 if tree else 1))})()] * 99)

    ship(other={"curve": wrong}, same={"curve": curve})
    real = tuning._going
    monkeypatch.setattr(tuning, "_going", going)
    tuned = fit(tiny_target, head)
    # 30 / 1.6 = 18.75 ms a token, 50 / 2.0 = 25.0, 90 / 2.02 = 44.6: more than 1.4 times the least, so nothing larger is tried
    assert tried == [0, 2, 4, 8] and [round(point["ms_per_token"], 2) for point in tuned.curve] == [18.75, 25.0, 44.55]
    assert (tuned.tree, tuned.tau, tuned.plain_ms, tuned.acceptance_from) == (TreeShape(2, 5, 2), 1.6, 10.0, "a Xeon")
    assert load_head(folder, tiny_target).tree == TreeShape(2, 5, 2)
    assert "18.8  <- chosen" in kept.told(tuned) and "tau from a Xeon" in kept.told(tuned)

    monkeypatch.setattr(tuning, "_going", real)  # and with steps of this machine, from another dtype's choice
    ship(other={"curve": curve})
    asked = ["tune", "--quick", "--target", str(GOLDEN / "tiny_base"), "--dtype", "float32", "--head", folder]
    assert main(asked) == 0
    again = tuned_for(tiny_target, head)
    assert {point["tau"] for point in again.curve} <= set(taus.values()) - {9.0} and again.tau == winner(again.curve)["tau"]
    assert 0 < again.plain_ms < 1000 and "<- chosen" in capsys.readouterr().out

    kept.remember(here, kept.Tuned(**{**facts, "nodes": 6}))  # as a whole tune on this machine leaves it
    assert main(asked) == 2 and "its choice stays" in capsys.readouterr().err
    assert load_head(folder, tiny_target).tree == TreeShape(2, 5, 6)


def test_every_shipped_head_has_a_tree_for_both_dtypes_of_a_cpu() -> None:
    chosen = {(one.head, one.dtype): one for one in kept.known(kept.SHIPPED).values()}
    for name, folder in catalogue().items():
        section = json.loads((folder / "config.json").read_text())["draftscope"]
        assert chosen[name, "bfloat16"].tree == TreeShape(**section["tree"])
        assert chosen[name, "float32"].nodes <= chosen[name, "bfloat16"].nodes, "rows are dearer in float32"


def test_scale_measures_and_refuses_what_the_target_can_not_hold(tiny_target, capsys) -> None:
    measured = verification(tiny_target, [1, 9, 30], [20, 50], repeats=1)
    assert set(measured) == {(20, 1), (20, 9), (20, 30), (50, 1), (50, 9), (50, 30)} and min(measured.values()) > 0
    with pytest.raises(UsageError, match="are more than the"):
        verification(tiny_target, [60], [tiny_target.context_length - 10])
    head, folder = str(GOLDEN / "hass_tiny" / "head_mid"), str(GOLDEN / "tiny_base")
    asked = ["scale", "--target", folder, "--dtype", "float32", "--head", head, "--contexts", "20", "40", "--rows", "1", "5"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "20 " in out and "ms of a draft at context 40" in out
    with pytest.raises(SystemExit):
        main([*asked[:-2], "--rows", "0"])
