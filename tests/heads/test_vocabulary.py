"""A draft vocabulary for a head that was not trained with one: fewer proposals, the same output."""

import pytest
import torch

from decoding import Settings, UsageError, generate
from heads import load_head
from heads.vocabulary import most_frequent
from tests.conftest import GOLDEN


def test_the_most_frequent_tokens_are_the_first_merges_and_the_stop_tokens(tiny_target, monkeypatch) -> None:
    monkeypatch.setattr(tiny_target, "stop_token_ids", frozenset({200}))
    assert most_frequent(None, None, tiny_target) is None
    assert most_frequent(None, 4, tiny_target).tolist() == [0, 1, 2, 200]
    own = torch.tensor([5, 50, 100, 200])
    assert most_frequent(own, None, tiny_target) is own
    assert most_frequent(own, 3, tiny_target).tolist() == [5, 50, 200]
    with pytest.raises(UsageError, match="between 1 and the 4 tokens"):
        most_frequent(own, 5, tiny_target)


@pytest.mark.parametrize("name", ["hass_tiny/head_mid", "medusa_tiny"])
def test_restricted_heads_propose_less_and_change_nothing(name: str, tiny_target) -> None:
    folder, asked, prompt = str(GOLDEN / name), Settings(max_new_tokens=40, stop_token_ids=()), [72, 101, 108, 108, 111]
    plain = generate(tiny_target, None, prompt, asked)
    if name == "medusa_tiny":
        with pytest.raises(UsageError, match="lm_heads of its own"):
            load_head(folder, tiny_target, draft_vocab=120)
        return
    run = generate(tiny_target, load_head(folder, tiny_target, draft_vocab=120), prompt, asked)
    assert run.output_ids == plain.output_ids and run.head_info.draft_vocab_size == 120
    assert max(token for step in run.steps for token in step.node_ids) < 120
