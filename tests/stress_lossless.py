"""Is it lossless, whatever the target, the head, the tree and the settings? `python -m tests.stress_lossless --cases 2000`

Random small targets (Llama, Mistral with and without a window, Qwen2, Qwen3; grouped keys, tied embeddings, vocabularies smaller
than top-k, equal rows and equal logits), each with random heads (untrained, several layers, draft vocabularies, one that often
guesses right), trees, prompts (one token, too little context left) and stop tokens (every place of the output in turn), in float32.
The reference is transformers' own forward over the whole text, one token after the other. A difference counts as a near-tie where
the two best logits there are within 1e-4 of each other. On some targets the distribution of sampled texts is tested as well.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from decoding import Settings, generate, load_target
from decoding.accept import Draws, target_probabilities
from decoding.errors import UsageError
from decoding.head import DraftTree
from decoding.records import HeadInfo, TreeShape
from decoding.target import Target
from tests.stubs import untrained_head

CASES_A_TARGET = 10
NEAR = 1e-4


class KnowingHead:
    """Drafts what the target will say, except where it errs on purpose: deep paths are accepted, and left at every depth."""

    name, tree = "knowing", TreeShape(4, 3, 12)

    def __init__(self, target: Target, text: list[int], rng: random.Random) -> None:
        self.target, self.text, self.rng = target, text, rng
        self.info = HeadInfo(method="knowing", layers=1, parameters=0, draft_vocab_size=target.vocab_size)

    def start(self, capacity: int, shape: TreeShape) -> "KnowingHead":
        self.shape, self.known = shape, 0
        return self

    def propose(self, features: torch.Tensor, token_ids: torch.Tensor) -> DraftTree:
        self.known += len(token_ids)
        vocab, width = self.target.vocab_size, min(self.shape.top_k, self.target.vocab_size)
        nodes: list[tuple[int, int, int]] = []  # token, parent, depth
        level = [-1]
        for depth in range(1, self.shape.depth + 1):
            place, below = self.known + depth, []
            right = self.text[place] if place < len(self.text) and self.rng.random() < 0.8 else self.rng.randrange(vocab)
            for parent in level[: self.shape.top_k]:
                others = self.rng.sample(range(vocab), width)
                tokens = list(dict.fromkeys([right, *others]))[:width]
                self.rng.shuffle(tokens)
                for token in tokens:
                    if len(nodes) < self.shape.nodes:
                        below.append((len(nodes), token == right))
                        nodes.append((token, parent, depth))
            level = [node for node, _ in sorted(below, key=lambda pair: not pair[1])]
        tokens, parents, depths = (torch.tensor([node[i] for node in nodes], dtype=torch.long) for i in range(3))
        return DraftTree(tokens, parents, depths, torch.full((len(nodes),), -1.0), -depths.float())


def random_config(rng: random.Random) -> PretrainedConfig:
    """An architecture of random small sizes."""
    kv = rng.choice((1, 1, 2, 3))
    heads, head_dim = kv * rng.choice((1, 2, 3, 4)), rng.choice((4, 8, 16))
    sizes = {
        "vocab_size": rng.choice((2, 3, 5, 7, 11, 30, 61, 257)),
        "hidden_size": heads * head_dim,
        "intermediate_size": rng.choice((16, 40, 64)),
        "num_hidden_layers": rng.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": rng.choice((12, 24, 40, 96)),
        "initializer_range": rng.choice((0.05, 0.3, 0.8)),
        "tie_word_embeddings": rng.random() < 0.4,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    kind = rng.choice(("llama", "mistral", "mistral, window", "qwen2", "qwen3"))
    if kind == "llama":
        return LlamaConfig(**sizes, attention_bias=rng.random() < 0.3, mlp_bias=rng.random() < 0.2)
    if kind.startswith("mistral"):
        return MistralConfig(**sizes, sliding_window=rng.choice((4, 9)) if "window" in kind else None)
    return Qwen2Config(**sizes) if kind == "qwen2" else Qwen3Config(**sizes, head_dim=head_dim)


def random_target(rng: random.Random, folder: Path) -> Target:
    """Saved and loaded again, so that it is driven as any target is."""
    config = random_config(rng)
    torch.manual_seed(rng.randrange(1 << 30))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        rows, vocab = model.get_output_embeddings().weight, config.vocab_size
        flaw = rng.random()
        if flaw < 0.15:
            rows.zero_()  # all logits are equal, everywhere
        elif flaw < 0.35 and vocab > 2:
            rows[rng.randrange(vocab)] = rows[rng.randrange(vocab)]  # two tokens that are always tied
        elif flaw < 0.45:
            rows.copy_(rows.sign() * 0.5)  # many ties
    model.save_pretrained(folder)
    return load_target(str(folder), device="cpu", dtype="float32")


@torch.inference_mode()
def plain(target: Target, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Greedy decoding by whole forwards, and the gap of the two best logits at each token."""
    text, gaps = list(prompt), []
    for _ in range(min(tokens, target.context_length - len(prompt))):
        logits = target.model(torch.tensor([text])).logits[0, -1].float()
        best = logits.topk(2).values
        gaps.append(float(best[0] - best[1]))
        text.append(int(logits.argmax()))
    return text[len(prompt) :], gaps


def random_head(rng: random.Random, target: Target, prompt: list[int], output: list[int]) -> object:
    kind = rng.random()
    if kind < 0.5:
        return KnowingHead(target, [*prompt, *output], rng)
    vocab = None
    if rng.random() < 0.4 and target.vocab_size > 2:
        vocab = torch.tensor(sorted(rng.sample(range(target.vocab_size), rng.randint(1, target.vocab_size - 1))))
    return untrained_head(target, layers=rng.choice((1, 2, 3)), seed=rng.randrange(1 << 30), draft_vocab=vocab)


def random_tree(rng: random.Random, target: Target) -> TreeShape:
    shape = TreeShape(rng.choice((1, 1, 2, 3, 6, 9)), rng.choice((1, 2, 3, 10)), 1)
    return shape._replace(nodes=rng.randint(1, min(shape.pool, 40)))


def case(rng: random.Random, target: Target, counts: Counter) -> str | None:
    """One case; what is wrong with it, if anything is."""
    room = target.context_length
    length = rng.choice((1, 1, 2, rng.randint(1, room - 1), max(1, room - rng.randint(1, 6))))
    prompt = [rng.randrange(target.vocab_size) for _ in range(length)]
    tokens = rng.choice((1, 2, rng.randint(1, 24), room))
    output, gaps = plain(target, prompt, tokens)
    head, shape = random_head(rng, target, prompt, output), random_tree(rng, target)
    try:
        head.start(room, shape)
    except UsageError:  # a head refuses more children than it has tokens
        counts["refused for top-k"] += 1
        width = int(head.info.draft_vocab_size)
        shape = TreeShape(shape.depth, width, 1)
        shape = shape._replace(nodes=rng.randint(1, min(shape.pool, 40)))
    stops: list[int | None] = [None]
    if rng.random() < 0.3:
        stops += sorted(set(output))  # each place where a token comes first is where that token stops it
    for stop in stops:
        expected = output if stop is None else output[: output.index(stop) + 1]
        settings = Settings(
            max_new_tokens=tokens, tree_depth=shape.depth, tree_top_k=shape.top_k, tree_nodes=shape.nodes,
            stop_token_ids=() if stop is None else (stop,),
        )  # fmt: skip
        for drafting in (head, None) if stop is None else (head,):
            run = generate(target, drafting, prompt, settings)
            counts["runs"] += 1
            counts["accepted"] += sum(len(step.accepted) for step in run.steps)
            counts["context limit"] += len(prompt) + len(output) == room and len(output) < tokens
            if run.output_ids == expected:
                continue
            both = zip(run.output_ids, expected, strict=False)
            at = next((index for index, (a, b) in enumerate(both) if a != b), min(len(run.output_ids), len(expected)))
            if at < len(gaps) and gaps[at] < NEAR and run.output_ids[:at] == expected[:at]:
                counts["near-ties"] += 1
                continue
            return f"{run.output_ids} for {expected} at {at}, gap {gaps[at] if at < len(gaps) else None}, {shape}, {type(head).__name__}"
    return None


@torch.inference_mode()
def sampled(rng: random.Random, target: Target, draws: int) -> float:
    """p-value of the joint distribution of two sampled tokens against the target's own, by the chi-square test."""
    asked = {"temperature": rng.choice((0.7, 1.0)), "top_p": rng.choice((1.0, 0.8)), "top_k": rng.choice((0, 2))}
    prompt = [rng.randrange(target.vocab_size) for _ in range(2)]
    shape = TreeShape(2, min(3, target.vocab_size), 1)
    shape = shape._replace(nodes=rng.randint(1, shape.pool))
    settings = Settings(max_new_tokens=2, tree_depth=2, tree_top_k=shape.top_k, tree_nodes=shape.nodes, stop_token_ids=(), **asked)
    head = untrained_head(target, layers=1, seed=rng.randrange(1 << 30))
    vocab = range(target.vocab_size)
    after = {
        context: target_probabilities(target.model(torch.tensor([[*prompt, *context]])).logits[0, -1:], settings)[0].double()
        for context in [(), *((token,) for token in vocab)]
    }
    expected = {(a, b): float(after[()][a] * after[a,][b]) for a, b in product(vocab, vocab)}
    source = Draws(rng.randrange(1 << 30))
    seen = Counter(tuple(generate(target, head, prompt, settings, draws=source).output_ids) for _ in range(draws))
    if any(expected[pair] < 1e-9 for pair in seen):
        return 0.0
    common = [pair for pair, share in expected.items() if share * draws >= 5]
    observed, wanted = [seen[pair] for pair in common], [expected[pair] * draws for pair in common]
    if draws - sum(wanted) >= 1:
        observed, wanted = [*observed, draws - sum(observed)], [*wanted, draws - sum(wanted)]
    if len(observed) < 2:
        return 1.0
    return float(chisquare(observed, [value * sum(observed) / sum(wanted) for value in wanted]).pvalue)


def stress(cases: int, seed: int, sampling_every: int = 8, draws: int = 300) -> tuple[Counter, list[str], list[float]]:
    """Counts, failures, p-values."""
    counts, failures, values = Counter(), [], []
    for number in range((cases + CASES_A_TARGET - 1) // CASES_A_TARGET):
        rng = random.Random(seed * 1_000_003 + number)
        with tempfile.TemporaryDirectory() as folder:
            target = random_target(rng, Path(folder))
            counts["targets"] += 1
            for _ in range(min(CASES_A_TARGET, cases - counts["cases"])):
                counts["cases"] += 1
                if wrong := case(rng, target, counts):
                    failures.append(f"seed {seed}, target {number} ({target.model.config.model_type}): {wrong}")
            if number % sampling_every == 0 and target.vocab_size <= 11 and target.context_length > 4:
                values.append(sampled(rng, target, draws))
        if sys.stderr.isatty() or number % 20 == 0:
            print(f"{counts['cases']} cases, {len(failures)} failures", file=sys.stderr, flush=True)
    return counts, failures, values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, failures, values = stress(options.cases, options.seed)
    bound = 1e-3 / max(1, len(values))  # Bonferroni: one false alarm in a thousand calls of this
    failures += [f"sampling: p = {value:.2g}" for value in values if value < bound]
    print(dict(counts), f"{len(values)} sampled distributions, smallest p {min(values, default=1):.3g}", f"{len(failures)} failures")
    print("\n".join(failures[:20]))
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
