"""Sampling is lossless: the joint distribution of the first three tokens is the target's, whatever the tree proposes."""

import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from decoding import Generation, Settings, generate
from decoding.accept import Draws, target_probabilities
from decoding.target import Target
from tests.stubs import TableHead, TableTarget, untrained_head

VOCAB, PROMPT, SAMPLES = 5, [1, 4], 1500
FILTERS = {"none": {}, "top-p": {"top_p": 0.8}, "top-k": {"top_k": 3}, "both": {"top_p": 0.7, "top_k": 4}}
PROPOSALS = {
    "everything": lambda logits: range(VOCAB),  # whatever is drawn, a child has it
    "something": lambda logits: logits.topk(2).indices.tolist(),
    "something, worst first": lambda logits: logits.topk(3).indices.flip(0).tolist(),
    "nothing": lambda logits: (-logits).topk(2).indices.tolist(),  # the least probable ones, mostly filtered away
}


def check(outcomes: Counter, expected: dict[tuple[int, ...], float]) -> None:
    """Chi-square at 0.1 %, rare outcomes put together; nothing impossible may occur."""
    total = sum(outcomes.values())
    assert all(expected[outcome] > 0 for outcome in outcomes), "a token outside the filtered distribution was drawn"
    common = [outcome for outcome, share in expected.items() if share * total >= 5]
    observed = [outcomes[outcome] for outcome in common]
    wanted = [expected[outcome] * total for outcome in common]
    if total - sum(wanted) >= 1:
        observed.append(total - sum(observed))
        wanted.append(total - sum(wanted))
    if len(observed) > 1:
        scale = sum(observed) / sum(wanted)
        assert chisquare(observed, [value * scale for value in wanted]).pvalue > 1e-3


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_joint_distribution(proposal: str, temperature: float, filters: str) -> None:
    target = TableTarget(VOCAB)
    head = TableHead(target, PROPOSALS[proposal])
    settings = Settings(max_new_tokens=3, temperature=temperature, tree_depth=2, tree_top_k=5, tree_nodes=30, **FILTERS[filters])

    def after(previous: int, own: int) -> torch.Tensor:
        return target_probabilities(target.table[previous, own][None], settings)[0].double()

    expected = {
        (a, b, c): float(after(*PROMPT)[a] * after(PROMPT[1], a)[b] * after(a, b)[c])
        for a, b, c in itertools.product(range(VOCAB), repeat=3)
    }
    draws, outcomes, accepted = Draws(7), Counter(), Counter()
    for _ in range(SAMPLES):
        generation = Generation(target, head, PROMPT, settings, draws=draws)
        steps = list(generation)
        outcomes[tuple(generation.output_ids)] += 1
        accepted[len(steps[0].accepted)] += 1
    check(outcomes, expected)
    if proposal == "everything":
        assert accepted[2] == SAMPLES
    elif proposal == "nothing" and filters != "none":
        assert accepted[0] > 0.9 * SAMPLES
    elif proposal == "something":
        assert accepted[2] and (filters != "none" or (accepted[0] and accepted[1]))


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}])
def test_joint_distribution_with_a_real_target(settings: dict) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        initializer_range=0.7, max_position_embeddings=64,
    )  # fmt: skip
    target = Target("tiny", LlamaForCausalLM(config).eval(), None, frozenset())
    head = untrained_head(target, layers=2)
    asked = Settings(max_new_tokens=3, tree_depth=3, tree_top_k=3, tree_nodes=8, **settings)
    prompts = [[*PROMPT, *rest] for n in range(3) for rest in itertools.product(range(VOCAB), repeat=n)]
    with torch.inference_mode():
        after = {tuple(p): target_probabilities(target.model(torch.tensor([p])).logits[:, -1], asked)[0].double() for p in prompts}
    expected = {
        (a, b, c): float(after[1, 4][a] * after[1, 4, a][b] * after[1, 4, a, b][c]) for a, b, c in itertools.product(range(VOCAB), repeat=3)
    }
    draws = Draws(11)
    outcomes = Counter(tuple(generate(target, head, PROMPT, asked, draws=draws).output_ids) for _ in range(800))
    check(outcomes, expected)


def test_filters_keep_what_they_say() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))

    def shares(**settings) -> list[float]:
        return target_probabilities(logits, Settings(temperature=1.0, **settings))[0].tolist()

    assert shares() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert shares(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert shares(top_p=0.65) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert shares(top_p=0.75) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert shares(top_p=1e-9) == pytest.approx([1, 0, 0, 0])
    # top-k first, then top-p over what is left of it
    assert shares(top_k=3, top_p=0.5) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    cold = target_probabilities(logits, Settings(temperature=0.5))[0]
    assert cold.tolist() == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])


def test_same_seed_same_output() -> None:
    target = TableTarget(VOCAB)
    head = TableHead(target, PROPOSALS["something"])
    runs = [generate(target, head, PROMPT, Settings(max_new_tokens=30, temperature=1.0, seed=seed)).output_ids for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]
