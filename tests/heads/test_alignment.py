"""HASS alignment against a literal roll-out of the head, and the reference's training step."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import LlamaConfig

from heads.feature import FeatureHead, FeatureShape
from heads.training.alignment import aligned_forwards
from heads.training.losses import LossWeights, Teacher, step_loss

GOLDEN = Path(__file__).parent.parent / "golden" / "hass_tiny"
CONFIG = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40}


def make_head(layers: int) -> FeatureHead:
    torch.manual_seed(layers)
    return FeatureHead(FeatureShape(LlamaConfig(num_hidden_layers=layers, **CONFIG)))


class RollOut:
    """Attention over a literal key/value cache that grows by concatenation."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer, query, key, value):
        if layer in self.cache:
            key, value = (torch.cat((old, new), dim=2) for old, new in zip(self.cache[layer], (key, value), strict=True))
        self.cache[layer] = (key, value)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows), -torch.inf)
        return torch.softmax(scores, -1) @ value


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
@pytest.mark.parametrize("layers", [1, 2, 3])
@torch.no_grad()
def test_equals_a_roll_out(layers: int, steps: int) -> None:
    head, rows = make_head(layers), 12
    embeddings, features = torch.randn(2, rows, 32), torch.randn(2, rows, 32)
    outputs = aligned_forwards(head, embeddings, features, steps)
    for start in range(rows):
        # true features up to `start`, then the head feeds itself
        cache = RollOut()
        positions = torch.arange(start + 1)[None]
        out = head(embeddings[:, : start + 1], features[:, : start + 1], head.rotary_at(positions, torch.float32), cache)[:, -1:]
        torch.testing.assert_close(outputs[0][:, start : start + 1], out, atol=1e-5, rtol=1e-5)
        for step in range(1, steps):
            row = start + step
            if row >= rows:
                break
            out = head(embeddings[:, row : row + 1], out, head.rotary_at(torch.tensor([[row]]), torch.float32), cache)
            torch.testing.assert_close(outputs[step][:, row : row + 1], out, atol=1e-5, rtol=1e-5)


def test_one_step_is_the_eagle_loss() -> None:
    head, rows = make_head(1), 9
    embeddings, features, targets = (torch.randn(2, rows, 32) for _ in range(3))
    lm_head, mask = torch.randn(40, 32), torch.rand(2, rows) > 0.3
    ones = torch.ones(int(mask.sum()))
    (out,) = aligned_forwards(head, embeddings, features, 1)
    ours, _ = step_loss(out[mask], targets[mask], Teacher.of(targets[mask], lm_head), ones, ones, lm_head, LossWeights())
    # EAGLE (2401.15077): SmoothL1 of the features + 0.1 soft cross-entropy, masked means
    log_q = functional.log_softmax(out @ lm_head.T, -1)
    cross = -(functional.softmax(targets @ lm_head.T, -1) * log_q).sum(-1)
    smooth = functional.smooth_l1_loss(out, targets, reduction="none").mean(-1)
    wanted = ((smooth + 0.1 * cross) * mask).sum() / (mask.sum() + 1e-5)
    torch.testing.assert_close(ours, wanted)
    given = torch.autograd.grad(ours, list(head.parameters()), retain_graph=True)
    for mine, theirs in zip(given, torch.autograd.grad(wanted, list(head.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_reference_training_step() -> None:
    data = load_file(GOLDEN / "train_step_masked.safetensors")
    wanted = json.loads((GOLDEN / "train_step.json").read_text())["masked"]
    config = json.loads((GOLDEN / "head_mid" / "config.json").read_text())
    head = FeatureHead(FeatureShape(LlamaConfig.from_dict(config)))
    head.load_state_dict({name[5:]: value for name, value in data.items() if name.startswith("init.") and "embed" not in name})
    lm_head = data["lm_head.weight"]
    embeddings = functional.embedding(data["batch.input_ids"], data["init.embed_tokens.weight"])
    outputs = aligned_forwards(head, embeddings, data["batch.hidden_states"], wanted["forward_num_total"])

    mask = data["batch.loss_mask"].bool()
    targets = data["batch.target"][mask]
    teacher, count = Teacher.of(targets, lm_head, wanted["topk"]), torch.ones(int(mask.sum()))
    names = wanted["weights"]
    weights = LossWeights(names["v_w"], names["p_w"], names["topk_w"], wanted["topk"])
    total = 0.0
    for index, (out, losses) in enumerate(zip(outputs, wanted["forwards"], strict=True)):
        rows = slice(0, 24) if index == 0 else slice(0, 17)
        torch.testing.assert_close(out[:, rows][0], data[f"forward{index}.predict"][:, rows][0], atol=1e-5, rtol=1e-5)
        loss, told = step_loss(out[mask], targets, teacher, count, count, lm_head, weights)
        assert [*told[:3].tolist(), loss.item()] == pytest.approx(
            [losses["vloss"], losses["ploss"], losses["topk_loss"], losses["total"]], abs=1e-5
        )
        total = total + loss
    total.backward()
    parameters = dict(head.named_parameters())
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, data[f"grad.{name}"], atol=1e-5, rtol=1e-5)
    optimizer = torch.optim.AdamW(parameters.values(), wanted["lr"], betas=tuple(wanted["betas"]), weight_decay=wanted["weight_decay"])
    torch.nn.utils.clip_grad_value_(parameters.values(), wanted["grad_clip_value"])
    optimizer.step()
    for name, parameter in parameters.items():
        # AdamW's first step is rate * g / (|g| + 1e-8): a gradient of rounding noise alone moves a weight by anything up to the rate
        noise = data[f"grad.{name}"].abs() < 1e-7
        assert noise.float().mean() < 0.01
        off = (parameter.detach() - data[f"after.{name}"]).abs()
        assert off[~noise].max() <= 1e-5
        assert off.max() <= 2 * wanted["lr"]
