"""Parts of the training: Medusa's rows, static trees, the adversary, first weights, metrics."""

import json
import sys

import pytest
import torch
from torch.nn import functional

from heads.training.adversary import Discriminator, adversarial_loss, discriminator_loss
from heads.training.batches import BatchLoader
from heads.training.conditioning import condition, input_sizes, plain_state
from heads.training.features import FeatureStore
from heads.training.heldout import measure
from heads.training.log import Log
from heads.training.losses import LossWeights, Teacher, step_loss
from heads.training.recipe import METHODS, recipe_for
from heads.training.static_tree import build_choices
from heads.training.students import FeatureStudent, MedusaStudent, fit_input
from heads.training.workers import Workers


@pytest.fixture
def store(tiny_target) -> FeatureStore:
    """Two dialogues of random tokens, answers from the third and the ninth token on."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 250, (40,), generator=generator, dtype=torch.int32).numpy()
    answer = torch.zeros(40, dtype=torch.bool)
    answer[3:15] = answer[24:40] = True
    return FeatureStore(tokens, answer.numpy(), torch.tensor([0, 15, 40]).numpy(), ["a", "b"], None, "digest")


def test_pairs_are_supervised_by_the_token_two_further(tiny_target, store) -> None:
    loader = BatchLoader(tiny_target, store, None)
    batch = loader.load([0, 1])
    assert batch.features.shape == (2, 32, 64)  # rounded up
    assert batch.rows[:28].tolist() == [*range(1, 13), *range(32 + 7, 32 + 23)] and batch.place[:28].tolist() == [
        *range(1, 13),
        *range(7, 23),
    ]
    assert batch.valid.tolist() == [1.0] * 28 + [0.0] * 100
    assert batch.following.tolist() == store.tokens[3:15].tolist() + store.tokens[24:40].tolist() + [-1] * 100
    assert torch.equal(batch.counted, batch.valid)
    # feature i + 1 is the one that gives token i + 2
    features = tiny_target.body(input_ids=torch.tensor(store.tokens[:15].tolist())[None]).last_hidden_state[0]
    torch.testing.assert_close(batch.wanted[:12], features[2:14])
    torch.testing.assert_close(batch.teacher.probabilities[:12], torch.softmax(tiny_target.logits(features[2:14]), -1))
    torch.testing.assert_close(batch.embeddings[0, :14], tiny_target.embedding(torch.tensor(store.tokens[1:15].tolist())))
    assert store.supervised(0) == 12 and store.supervised(1) == 16


def test_a_draft_vocabulary_restricts_the_teacher(tiny_target, store) -> None:
    vocab = torch.tensor(sorted({*store.tokens[:12].tolist(), 256}))
    batch, whole = BatchLoader(tiny_target, store, vocab).load([0]), BatchLoader(tiny_target, store, None).load([0])
    wanted = whole.teacher.probabilities[:, vocab]
    torch.testing.assert_close(batch.teacher.probabilities[:12], (wanted / wanted.sum(-1, keepdim=True))[:12])
    inside = [token in vocab.tolist() for token in store.tokens[3:15].tolist()]
    assert batch.counted[:12].tolist() == [float(value) for value in inside]
    assert vocab[batch.following[0]] == store.tokens[3]


def test_medusa_rows_of_every_position_are_about_the_same_token(tiny_target, store) -> None:
    recipe = recipe_for("medusa", positions=3)
    loader = BatchLoader(tiny_target, store, None)
    student = MedusaStudent(tiny_target, recipe, loader.lm_head)
    batch = loader.load([0])
    outputs = student.outputs(batch, batch.features, 3)
    for position, blocks in enumerate(student.module.medusa_head):
        assert outputs[position].shape == batch.features.shape
        for row in range(position, 14):
            wanted = blocks[0](batch.features[0, row - position])  # position m guesses m + 1 tokens after the root's feature
            torch.testing.assert_close(outputs[position][0, row], wanted)
        seen = student.seen(batch, position)
        torch.testing.assert_close(seen[11], batch.features[0, 12 - position])


def test_held_out_ranks_follow_the_text(tiny_target, store) -> None:
    recipe = recipe_for("medusa", positions=2)
    loader = BatchLoader(tiny_target, store, None)
    student = MedusaStudent(tiny_target, recipe, loader.lm_head)
    figures = measure(student, loader, [0, 1], 2, 4096, True, Workers())
    assert figures.tokens == 28 and set(figures.by_kind) == {"a", "b"}
    assert figures.ranks.shape == (11 + 15, 2)  # chains need both of their rows supervised
    batch = loader.load([0])
    guesses = [functional.linear(x, loader.lm_head).topk(10).indices for x in student.module(batch.features[0])]
    for chain, pair in enumerate(range(1, 12)):
        for position in range(2):
            token, found = int(store.tokens[pair + 2 + position]), guesses[position][pair].tolist()
            assert figures.ranks[chain, position] == (found.index(token) if token in found else 10)


def test_static_tree_is_built_from_what_was_guessed_right() -> None:
    ranks = torch.tensor([[0, 0]] * 60 + [[0, 1]] * 5 + [[1, 0]] * 25 + [[10, 0]] * 10)
    choices, worth = build_choices(ranks, width=3, count=5)
    assert choices[:3] == [(0,), (0, 0), (1,)]
    assert worth == sorted(worth, reverse=True)
    assert all(len(path) == 1 or path[:-1] in choices[:index] for index, path in enumerate(choices))
    assert worth[0] == pytest.approx(0.65) and worth[1] == pytest.approx((60 + 50 * 0.65 * 0.95) / 150)
    # where one guess rules out another, counting beats multiplying: (1, 0) is worth more than (0, 1)
    assert choices.index((1, 0)) < choices.index((0, 1))
    every, _ = build_choices(ranks, width=3, count=1000)
    assert len(every) == 3 + 9


def test_discriminator_learns_and_the_head_follows() -> None:
    torch.manual_seed(0)
    judge = Discriminator(8, 16, 2)
    context, real, ones = torch.randn(256, 16), torch.randn(256, 8), torch.ones(256)
    fake = torch.nn.Parameter(torch.randn(256, 8) * 0.1 + torch.linspace(0, 3, 8))
    optimizer = torch.optim.AdamW(judge.parameters(), 1e-2)
    for _ in range(60):
        loss, recognised = discriminator_loss(judge, context, real, fake, ones, 1)
        optimizer.zero_grad()
        loss.backward()
        assert fake.grad is None, "the discriminator's lesson does not reach the head"
        optimizer.step()
    assert recognised.min() > 0.9
    before = adversarial_loss(judge, context, fake, ones, 1)
    (gradient,) = torch.autograd.grad(before, [fake])
    with torch.no_grad():
        fake -= 20 * gradient
    assert adversarial_loss(judge, context, fake, ones, 1) < before


def test_lambda_grows_and_the_rate_warms_up_and_falls() -> None:
    recipe = recipe_for("koala-eagle", adversary=0.5, learning_rate=1.0)
    assert [round(recipe.adversary_weight(step, 100), 3) for step in (0, 10, 20, 99)] == [0.0, 0.25, 0.5, 0.5]
    rates = [recipe.rate(step, 100) for step in range(100)]
    assert rates[0] == 0.25 and max(rates) == 1.0 and rates[-1] == pytest.approx(0.01, abs=0.01)
    cosine = recipe_for("eagle", schedule="cosine", learning_rate=1.0)
    assert cosine.rate(99, 100) == pytest.approx(0.1, abs=0.01) and cosine.rate(51, 100) == pytest.approx(0.55, abs=0.02)
    assert METHODS["hass"].adversary_weight(50, 100) == 0


def test_an_own_lm_head_learns_too() -> None:
    torch.manual_seed(0)
    hidden, matrix, weights = torch.randn(7, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True), LossWeights(0.0, 1.0, 0.5, 3)
    teacher, counted = Teacher.of(torch.randn(7, 6), torch.randn(9, 6), 3), torch.tensor([1.0, 1, 0, 1, 1, 1, 1])
    loss, _ = step_loss(hidden, hidden, teacher, counted, counted, matrix, weights)
    log_q = functional.log_softmax(hidden @ matrix.T, -1)
    rows = -(teacher.probabilities * log_q).sum(-1) - 0.5 * (teacher.best * log_q.gather(1, teacher.best_ids)).sum(-1)
    wanted = (rows * counted).sum() / (counted.sum() + 1e-5)
    torch.testing.assert_close(loss, wanted)
    for ours, theirs in zip(torch.autograd.grad(loss, [hidden, matrix]), torch.autograd.grad(wanted, [hidden, matrix]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_hard_labels_are_the_texts_tokens(tiny_target, store) -> None:
    batch = BatchLoader(tiny_target, store, None, hard_labels=True).load([0])
    assert torch.equal(batch.teacher.probabilities.argmax(-1)[:12], batch.following[:12]) and torch.all(
        batch.teacher.probabilities.sum(-1) == 1
    )
    hidden, weights = torch.randn(128, 64), LossWeights(0.0, 1.0, 0.0)
    loss, told = step_loss(hidden, batch.wanted, batch.teacher, batch.valid, batch.counted, tiny_target.lm_head.weight, weights)
    wanted = functional.cross_entropy(tiny_target.logits(hidden[:12]), batch.following[:12])
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    assert told[0] == 0


def test_first_weights_are_the_best_linear_guess(tiny_target, store) -> None:
    loader = BatchLoader(tiny_target, store, None)
    student = FeatureStudent(tiny_target, recipe_for("koala-eagle"))
    fit_input(student.module, loader, [[0], [1]])
    batch = loader.load([0, 1])
    (out,) = student.outputs(batch, batch.features, 1)
    assert functional.mse_loss(batch.supervised(out)[:28], batch.wanted[:28]) < 1e-3  # 28 equations, 129 unknowns each
    torch.testing.assert_close(out, student.module.fc(torch.cat((batch.embeddings, batch.features), -1)))


@pytest.mark.parametrize("method", ["koala-eagle", "koala-medusa"])
def test_inputs_of_size_one_change_the_training_and_not_the_head(tiny_target, store, tmp_path, method) -> None:
    recipe = recipe_for(method, fit_input=False)
    loader = BatchLoader(tiny_target, store, None)
    student = FeatureStudent(tiny_target, recipe) if recipe.family == "feature" else MedusaStudent(tiny_target, recipe, loader.lm_head)
    head, batch = student.module, loader.load([0, 1])
    before = {name: value.clone() for name, value in head.state_dict().items()}
    outputs = student.outputs(batch, batch.features, recipe.steps)
    embedding, feature = input_sizes(loader, [[0], [1]])
    torch.testing.assert_close(feature, batch.supervised(batch.features)[:28].square().mean(0).sqrt())
    condition(head, embedding, feature)
    for ours, wanted in zip(student.outputs(batch, batch.features, recipe.steps), outputs, strict=True):
        torch.testing.assert_close(ours, wanted)
    trained = dict(head.named_parameters())
    assert len(trained) == len(list(before)) and "weight" not in {name.rpartition(".")[2] for name in trained if "fc" in name}
    for name, value in plain_state(head).items():
        torch.testing.assert_close(value, before[name])


def test_the_log_forgets_what_a_killed_run_did_after_its_checkpoint(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    log = Log(tmp_path, 0)
    assert "no TensorBoard events" in capsys.readouterr().err
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    Log(tmp_path, 2).write({"step": 3, "loss": [0.5, 0.25]})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_tensorboard_gets_every_number(tmp_path, monkeypatch) -> None:
    board = {}

    class Writer:
        def __init__(self, folder, purge_step) -> None:
            assert folder.endswith("tensorboard") and purge_step == 1

        def add_scalar(self, name, value, step) -> None:
            board[name] = (value, step)

        def close(self) -> None:
            board["closed"] = True

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = Log(tmp_path, 0)
    log.write({"step": 7, "loss": 2.0, "agreement": [0.5, 0.25], "held_out": {"by_kind": {"code": 0.75}}})
    log.close()
    assert board == {
        "loss": (2.0, 7),
        "agreement/1": (0.5, 7),
        "agreement/2": (0.25, 7),
        "held_out/by_kind/code": (0.75, 7),
        "closed": True,
    }
