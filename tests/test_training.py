"""Training: samples in inference's prompts, exact resume, only the extractor changes, recipes."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from c2kv.backbone import Backbone
from c2kv.decode import Decoded
from c2kv.errors import ConfigError, DataError, MissingPackageError, TrainingError
from c2kv.extractor import Extractor
from c2kv.models import weights_digest
from c2kv.prompt import QA_INSTRUCTIONS, SYSTEM_PROMPTS, PromptTemplate, render_question
from c2kv.training.checkpoint import checkpoints
from c2kv.training.corpus import Corpus, HeldOut
from c2kv.training.dev import _wrong, dev_scores
from c2kv.training.loss import Group, Question, group_loss
from c2kv.training.recipe import DataSource, Recipe, Stage, load_recipe
from c2kv.training.records import read_records
from c2kv.training.samples import SampleOptions, Sampler
from c2kv.training.trainer import Trainer
from tiny import tiny_model

pytestmark = pytest.mark.embedded


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Corpora are made in a cache of the test's own."""
    monkeypatch.setattr("c2kv.training.corpus.cache_dir", lambda: tmp_path / "cache")


@pytest.fixture
def fresh_accelerator():
    """Accelerate settles on a precision once in a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


PLACES = ("Aldwick", "Brone", "Carrow", "Delph", "Eastmere", "Farley", "Goss", "Hallam")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight passages with two questions each, in the generic format."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = []
    for number, place in enumerate(PLACES):
        text = f"The mill at {place} was built in {1700 + number} and has {number + 2} floors."
        for question, answer in (
            (f"When was the mill at {place} built?", str(1700 + number)),
            (f"How many floors has the mill at {place}?", str(number + 2)),
        ):
            record = {
                "id": f"{place}-{answer}",
                "dataset": "mills",
                "split": "train",
                "documents": [{"title": place, "text": text}],
                "question": question,
                "answers": [answer],
                "supporting": [0],
                "group": place,
                "task": "qa",
            }
            lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def backbone(embedded):
    """A tiny model that reads with the embedded model's tokenizer."""
    model = tiny_model("llama", vocab_size=len(embedded.tokenizer))
    return Backbone(model, embedded.tokenizer, "tiny")


@pytest.fixture
def recipe(data, tmp_path):
    def make(**changes):
        settings = {
            "model": "tiny",
            "data": (DataSource(str(data)),),
            "dev": (DataSource(str(data)),),
            "output": str(tmp_path / "run"),
            "stages": (Stage(2, {"reconstruct": 1, "continue": 1}), Stage(4)),
            "groups": 2,
            "questions": 2,
            "documents": (1, 3),
            "passages": 2,
            "passage_tokens": 12,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "checkpoint_every": 2,
            "evaluate_every": 3,
            "dev_samples": 3,
        }
        return Recipe(**{**settings, **changes})

    return make


def sampler_of(backbone, data, **options):
    template = PromptTemplate.of(backbone.tokenizer)
    corpus = Corpus.of(DataSource(str(data)), template, 512, HeldOut())
    return Sampler([(corpus, None)], template, SampleOptions(**options), seed=3)


def logged(run, name):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def losses(run):
    return logged(run, "loss")


def test_samples_are_inferences_prompts_token_for_token(backbone, data):
    tokenizer = backbone.tokenizer
    sampler = sampler_of(backbone, data, documents=(2, 3), questions=2)
    records = list(read_records(data))
    for index in range(20):
        group = sampler.qa(index)
        for question in group.questions:
            text = tokenizer.decode(question.question)
            (record,) = [r for r in records if r.question in text]
            joined = list(question.prefix)
            for number in question.documents:
                joined += group.documents[number]
            joined += question.question
            contents = [
                tokenizer.decode(group.documents[n]).split("\n", 1)[1].split("<|im_end|>")[0]
                for n in question.documents
            ]
            possible = {
                tuple(
                    tokenizer(
                        PromptTemplate.of(tokenizer, system).conversation(
                            contents, render_question(record.question, instruction)
                        ),
                        add_special_tokens=False,
                    ).input_ids
                )
                for system in SYSTEM_PROMPTS
                for instruction in QA_INSTRUCTIONS
            }
            assert tuple(joined) in possible
            assert tokenizer.decode(question.answer) == record.answers[0] + "<|im_end|>"
            assert any(record.documents[0].text in content for content in contents)


def test_samples_vary_in_order_number_and_words_and_repeat_exactly(backbone, data):
    sampler = sampler_of(backbone, data, documents=(1, 3), questions=2)
    groups = [sampler.qa(index) for index in range(40)]
    assert {len(g.documents) for g in groups} == {1, 2, 3}
    questions = [q for g in groups for q in g.questions]
    assert any(list(q.documents) != sorted(q.documents) for q in questions)
    assert len({q.prefix for q in questions}) == len(SYSTEM_PROMPTS)
    assert groups == [
        sampler_of(backbone, data, documents=(1, 3), questions=2).qa(i) for i in range(40)
    ]
    assert all(len(set(g.documents)) == len(g.documents) for g in groups)


def test_no_gold_passage_is_left_out(backbone, tmp_path):
    """Two questions that need two passages each: asked together when they fit, else one."""
    documents = [{"title": p, "text": f"The mill at {p} is old."} for p in PLACES[:4]]
    lines = []
    for number, gold in enumerate(([0, 1], [2, 3])):
        record = {
            "id": str(number),
            "dataset": "m",
            "split": "train",
            "documents": documents,
            "question": f"Which {number}?",
            "answers": ["x"],
            "supporting": gold,
            "group": "g",
            "task": "qa",
        }
        lines.append(json.dumps(record) + "\n")
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(lines))
    for most, asked in ((4, 2), (2, 1), (1, 1)):
        group = sampler_of(backbone, path, documents=(1, most), questions=2).qa(0)
        assert len(group.questions) == asked
        texts = [backbone.tokenizer.decode(d) for d in group.documents]
        for question in group.questions:
            number = int(backbone.tokenizer.decode(question.question).split("Which ")[1][0])
            for place in PLACES[2 * number : 2 * number + 2]:
                assert any(place in text for text in texts)


def long_document(tmp_path, places, **more):
    """A record over one long document that names each place once, far from the others."""
    fields = [" ".join(f"Field {12 * i + n} grows rye." for n in range(12)) for i in range(9)]
    mills = [f"The mill at {place} is old." for place in places]
    text = " ".join(f"{field} {mill}" for field, mill in zip(fields, [*mills, ""], strict=True))
    made = {
        "dataset": "m",
        "split": "train",
        "documents": [{"title": None, "text": text}, {"title": None, "text": "Hay is dry."}],
        "supporting": [0],
        "group": "g",
        "task": "qa",
    }
    path = tmp_path / "long.jsonl"
    lines = [
        {**made, "id": place, "question": f"Which of {place}?", "answers": [answer]}
        for place, answer in more["asked"]
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sampler_with(backbone, path, document_tokens, **options):
    template = PromptTemplate.of(backbone.tokenizer)
    corpus = Corpus.of(DataSource(str(path)), template, document_tokens, HeldOut())
    options = SampleOptions(document_tokens=document_tokens, **options)
    return Sampler([(corpus, None)], template, options, seed=3), corpus


def test_a_long_gold_document_keeps_its_pieces_in_order(backbone, tmp_path):
    path = long_document(tmp_path, PLACES, asked=[("Aldwick", "Aldwick")])
    sampler, corpus = sampler_with(backbone, path, 128, documents=(2, 2), pieces=100)
    pieces = corpus.passage(1).pieces
    assert len(pieces) > 5
    orders = set()
    for index in range(8):
        group = sampler.qa(index)
        (question,) = group.questions
        read = [group.documents[i] for i in question.documents]
        at = read.index(pieces[0])
        assert read[at : at + len(pieces)] == list(pieces) and len(read) == len(pieces) + 1
        orders.add(at)
    assert orders == {0, 1}  # documents are shuffled, whole


def test_of_a_longer_one_what_is_kept_holds_the_answers_asked_for(backbone, tmp_path):
    asked = [("Aldwick", "Aldwick"), ("Hallam", "Hallam"), ("Goss", "in other words")]
    path = long_document(tmp_path, PLACES, asked=asked)
    sampler, corpus = sampler_with(backbone, path, 128, documents=(1, 1), pieces=2, questions=3)
    decode = backbone.tokenizer.decode
    pieces = corpus.passage(1).pieces
    seen = set()
    for index in range(30):
        group = sampler.qa(index)
        start = pieces.index(group.documents[0])
        assert group.documents == pieces[start : start + 2]  # neighbours
        text = "".join(map(decode, group.documents))
        for question in group.questions:
            place = decode(question.question).split("Which of ")[1].split("?")[0]
            assert place in text or place == "Goss"  # whose answer cannot be looked up
            seen.add(place)
    assert seen == {"Aldwick", "Hallam", "Goss"}


def test_an_answer_that_is_cut_is_not_taught_to_end_there(backbone, tmp_path):
    asked = [("Aldwick", "one two three four five six seven eight"), ("Goss", "one")]
    path = long_document(tmp_path, PLACES, asked=asked)
    sampler, _ = sampler_with(backbone, path, 512, answer_tokens=4, questions=2)
    (group,) = {sampler.qa(index) for index in range(1)}
    end = backbone.tokenizer.eos_token_id
    long, short = sorted((q.answer for q in group.questions), key=len, reverse=True)
    assert len(long) == 4 and end not in long and short[-1] == end


def test_no_question_has_two_turns_before_all_had_one(backbone, data):
    sampler = sampler_of(backbone, data, questions=1)
    turns = [sampler.qa(index).questions[0].question for index in range(48)]
    asked = [backbone.tokenizer.decode(ids).split("Question:")[-1] for ids in turns]
    for start in (0, 16, 32):
        times = Counter(
            next(r.question for r in read_records(data) if r.question in text)
            for text in asked[start : start + 16]
        )
        assert len(times) == 16 and set(times.values()) == {1}
    assert asked[:16] != asked[16:32]


def test_each_source_has_its_weight_and_its_own_turns(backbone, data, tmp_path):
    """Also where samples of one source come between those of another."""
    template = PromptTemplate.of(backbone.tokenizer)
    rare = long_document(tmp_path, PLACES, asked=[(place, place) for place in PLACES])
    corpora = [Corpus.of(DataSource(str(d)), template, 512, HeldOut()) for d in (data, rare)]
    sampler = Sampler([(corpora[0], 0.9), (corpora[1], 0.1)], template, SampleOptions(), seed=3)
    drawn = [sampler._next(index) for index in range(1000)]
    turns = [[(f.questions[i], f) for c, f, i in drawn if c is corpus] for corpus in corpora]
    assert [len(some) for some in turns] == [900, 100]
    for corpus, some in zip(corpora, turns, strict=True):
        for start in range(0, len(some) - corpus.questions, corpus.questions):
            one = Counter(map(str, some[start : start + corpus.questions]))
            assert len(one) == corpus.questions
    first = [c is corpora[1] for c, _, _ in drawn[:500]]
    assert 25 < sum(first) < 75  # spread over the round


def test_warm_ups_draw_from_what_questions_are_answered_from(backbone, tmp_path):
    """Other passages may be held out: only as an answer's source is a record dropped for one."""
    path = long_document(tmp_path, PLACES, asked=[("Aldwick", "Aldwick")])
    sampler, _ = sampler_with(backbone, path, 512, passages=8, passage_tokens=12)
    decode = backbone.tokenizer.decode
    drawn = [decode(d) for i in range(4) for d in sampler.passages(i, True).documents]
    assert len(drawn) == 32 and not any("Hay" in text for text in drawn)


def test_warm_up_samples_ask_for_their_own_passage(backbone, data):
    sampler = sampler_of(backbone, data, passages=4, passage_tokens=10)
    for group in (sampler.passages(i, repeat=True) for i in range(5)):
        for question in group.questions:
            (number,) = question.documents
            text = backbone.tokenizer.decode(question.answer)
            assert text in backbone.tokenizer.decode(group.documents[number])
    for group in (sampler.passages(i, repeat=False) for i in range(5)):
        for question in group.questions:  # what follows the passage in its document
            (number,) = question.documents
            document = backbone.tokenizer.decode(group.documents[number])
            passage = document.split("\n", 1)[1].split("<|im_end|>")[0]
            rest = backbone.tokenizer.decode(question.answer)
            texts = [record.documents[0].text for record in read_records(data)]
            assert rest and any(
                between.join((passage, rest)) in t for t in texts for between in (" ", "")
            )


def test_training_changes_the_extractor_alone_and_lowers_the_loss(backbone, recipe):
    before = weights_digest(backbone.model)
    settings = recipe(stages=(Stage(30),), groups=1, evaluate_every=100, checkpoint_every=100)
    trainer = Trainer(settings, backbone)
    start = Extractor.from_backbone(backbone).digest
    trainer.train()
    values = losses(trainer.output)
    assert len(values) == 30 and sum(values[-5:]) < 0.9 * sum(values[:5])
    assert weights_digest(backbone.model) == before
    made = Extractor.from_pretrained(trainer.output / "extractor", backbone)
    assert made.config.steps == 30 and made.trained and made.digest != start


@pytest.mark.parametrize("variant", ["plain", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_equals_an_uninterrupted_one(
    embedded, recipe, tmp_path, variant, dtype, fresh_accelerator
):
    model = tiny_model("llama", vocab_size=len(embedded.tokenizer)).to(dtype)
    backbone = Backbone(model, embedded.tokenizer, "tiny")
    whole = Trainer(recipe(output=str(tmp_path / "whole"), variant=variant), backbone)
    whole.train()
    settings = recipe(output=str(tmp_path / "parts"), variant=variant)
    Trainer(settings, backbone).train(until=3)
    with pytest.raises(TrainingError, match="--resume"):
        Trainer(settings, backbone)
    resumed = Trainer(settings, backbone, resume=True)
    assert resumed.step == 3
    resumed.train()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    for name, value in whole.subject.extractor.state_dict().items():
        assert torch.equal(value, resumed.subject.extractor.state_dict()[name]), name
    kept = sorted(p.name for p in (tmp_path / "parts" / "checkpoints").iterdir())
    assert kept == ["step-0000004", "step-0000006"]


@pytest.mark.parametrize("sharded", [False, True])
def test_two_processes_equal_one_with_twice_the_accumulation(backbone, recipe, tmp_path, sharded):
    settings = recipe(output=str(tmp_path / "one"), stages=(Stage(3),))
    Trainer(settings, backbone).train()
    settings = replace(settings, shard=sharded, gradient_checkpointing=sharded)
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from tiny import tiny_model\n"
        "from transformers import AutoTokenizer\n"
        "from c2kv.backbone import Backbone\n"
        "from c2kv.models import EMBEDDED, resolve\n"
        "from pathlib import Path\n"
        "from c2kv.training import corpus\n"
        f"corpus.cache_dir = lambda: Path({str(tmp_path / 'cache')!r})\n"
        "from c2kv.training.recipe import DataSource, Recipe, Stage\n"
        "from c2kv.training.trainer import Trainer\n"
        "tokenizer = AutoTokenizer.from_pretrained(resolve(EMBEDDED).source)\n"
        "backbone = Backbone(tiny_model('llama', vocab_size=len(tokenizer)), tokenizer, 'tiny')\n"
        f"Trainer({replace(settings, output=str(tmp_path / 'two'))!r}, backbone).train()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for name in ("loss", "dev_nll_right"):
        scores = [logged(tmp_path / run, name) for run in ("one", "two")]
        assert len(scores[0]) >= 2 and scores[1] == pytest.approx(scores[0], abs=1e-4)
    one, two = (
        Extractor.from_pretrained(tmp_path / run / "extractor", backbone) for run in ("one", "two")
    )
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, two.state_dict()[name], atol=2e-3, rtol=2e-2, msg=name)


def test_one_process_cannot_shard(backbone, recipe):
    with pytest.raises(ConfigError, match="accelerate launch"):
        Trainer(recipe(shard=True), backbone)


def test_an_interrupted_run_ends_its_step_saves_and_resumes(backbone, recipe, monkeypatch):
    settings = recipe(checkpoint_every=100)
    trainer = Trainer(settings, backbone)
    before = signal.getsignal(signal.SIGINT)
    groups = trainer._groups

    def interrupt():
        if trainer.step == 2:  # in the middle of the third step
            os.kill(os.getpid(), signal.SIGINT)
        return groups()

    monkeypatch.setattr(trainer, "_groups", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert signal.getsignal(signal.SIGINT) is before
    resumed = Trainer(settings, backbone, resume=True)
    assert resumed.step == 3
    resumed.train()
    whole = Trainer(replace(settings, output=settings.output + "-whole"), backbone)
    whole.train()
    for name, value in whole.subject.extractor.state_dict().items():
        assert torch.equal(value, resumed.subject.extractor.state_dict()[name]), name


def test_a_run_goes_on_from_an_extractor_and_counts_its_steps(backbone, data, recipe, tmp_path):
    first = Extractor.from_pretrained(Trainer(recipe(ratios=(2, 4)), backbone).train(), backbone)
    assert first.config.ratios == (2, 4) and first.config.steps == 6
    start = str(tmp_path / "run" / "extractor")
    more = tmp_path / "more.jsonl"
    more.write_bytes(data.read_bytes())
    again = recipe(start=start, data=(DataSource(str(more)),), output=str(tmp_path / "again"))
    trainer = Trainer(again, backbone)
    assert trainer.step == 0 and trainer.subject.extractor.digest == first.digest
    trainer.train(until=2)
    resumed = Trainer(again, backbone, resume=True)
    assert resumed.step == 2
    config = Extractor.from_pretrained(resumed.train(), backbone).config
    assert config.steps == 12 and config.ratios == ()
    assert first.config.trained_on == ("train",) and config.trained_on == ("more", "train")
    with pytest.raises(ConfigError, match="is plain, the recipe's variant is residual"):
        Trainer(recipe(start=start, variant="residual", output=str(tmp_path / "x")), backbone)


def test_a_plain_extractor_can_begin_as_a_residual_one(backbone, recipe, tmp_path):
    first = recipe(variant="residual", dev=(), stages=(Stage(1),), warmup_steps=0)
    start = str(Trainer(first, backbone).train())
    settings = recipe(start=start, anneal=4, stages=(Stage(6),), output=str(tmp_path / "plain"))
    trainer = Trainer(settings, backbone)
    residual = Extractor.from_pretrained(start, backbone)
    group = trainer.sampler.qa(0)
    trainer.subject.begin(0)
    with torch.no_grad():  # at first it is the residual one
        assert torch.equal(
            trainer.subject.total(group, 4)[0], group_loss(backbone, residual, group)[0]
        )
    shares = []
    begin = trainer.subject.begin
    trainer.subject.begin = lambda step: (
        begin(step),
        shares.append(trainer.subject.extractor.config.annealing),
    )
    trainer.train(until=2)
    (checkpoint,) = checkpoints(settings)
    halfway = Extractor.from_pretrained(checkpoint, backbone)  # says how far it is, and works so
    assert halfway.config.annealing == 0.75
    with torch.no_grad():
        ours, _ = trainer.subject.total(group, 4)
        assert torch.equal(group_loss(backbone, halfway, group)[0], ours)
    digest = halfway.digest
    halfway.config = replace(halfway.config, annealing=0.0)
    assert halfway.digest != digest
    made = Extractor.from_pretrained(trainer.train(), backbone)
    assert sorted(set(shares), reverse=True) == [1, 0.75, 0.5, 0.25, 0]
    assert made.config.variant == "plain" and made.config.annealing == 0
    with torch.no_grad():
        ours, _ = trainer.subject.total(group, 4)
        torch.testing.assert_close(group_loss(backbone, made, group)[0], ours, rtol=1e-2, atol=1e-2)
    with pytest.raises(ConfigError, match="for the plain variant"):
        recipe(anneal=4, variant="residual")


def test_another_recipe_cannot_resume_a_run(backbone, recipe):
    Trainer(recipe(), backbone).train(until=2)
    with pytest.raises(ConfigError, match="made by another recipe"):
        Trainer(recipe(learning_rate=1.0), backbone, resume=True)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    backbone, recipe, monkeypatch
):
    trainer = Trainer(recipe(), backbone)
    trainer.train(until=2)
    with torch.no_grad():
        trainer.subject.extractor.layers[0].k_proj.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"loss is nan at step 2; the last .*step-0000002': go"):
        trainer.train()
    again = Trainer(recipe(), backbone, resume=True)
    assert again.step == 2
    hook = again.subject.extractor.embedding.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainingError, match=r"gradient's norm is (nan|inf)"):
        again.train()
    hook.remove()
    assert all(p.isfinite().all() for p in again.subject.extractor.parameters())


def test_a_loss_that_is_not_finite_at_once_says_that_nothing_was_saved(backbone, recipe):
    trainer = Trainer(recipe(dev=()), backbone)
    with torch.no_grad():
        trainer.subject.extractor.layers[0].k_proj.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="at step 0; train anew, in another output"):
        trainer.train()
    with pytest.raises(TrainingError, match="holds an earlier run"):  # its metrics
        Trainer(recipe(), backbone)


def test_a_damaged_checkpoint_is_named(backbone, recipe):
    trainer = Trainer(recipe(), backbone)
    trainer.train(until=2)
    (checkpoint,) = checkpoints(trainer.recipe)
    state = checkpoint / "optimizer.pt"
    whole = state.read_bytes()
    for part in (b"", whole[:100], whole[:-400], b"no archive"):
        state.write_bytes(part)
        with pytest.raises(DataError, match=r"step-0000002' is damaged .*remove it"):
            Trainer(recipe(), backbone, resume=True)


def test_a_tracker_that_is_not_installed_is_named(backbone, recipe, monkeypatch):
    monkeypatch.setattr("c2kv.extras.find_spec", lambda package: None)
    with pytest.raises(MissingPackageError, match="'wandb'; run: pip install 'wandb'"):
        Trainer(recipe(trackers=("wandb",)), backbone)


def test_a_backbone_that_changes_spoils_the_run(embedded, recipe):
    model = tiny_model("llama", vocab_size=len(embedded.tokenizer))
    backbone = Backbone(model, embedded.tokenizer, "tiny")
    trainer = Trainer(recipe(dev=(), stages=(Stage(2),)), backbone)
    trainer.train(until=1)
    with torch.no_grad():
        backbone.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(TrainingError, match="backbone changed"):
        trainer.train()
    assert not (trainer.output / "extractor").exists()


def test_each_ratio_has_dev_scores(backbone, recipe):
    trainer = Trainer(recipe(ratio=4, ratios=(2, 4), stages=(Stage(1),), warmup_steps=0), backbone)
    trainer.train()
    lines = [json.loads(x) for x in (trainer.output / "metrics.jsonl").read_text().splitlines()]
    scores = [line for line in lines if "dev_gap" in line][-1]
    groups = [trainer.dev.qa(i) for i in range(3)]
    for ratio, name in ((4, ""), (2, "_k2")):
        total, tokens = 0.0, 0
        for group in groups:
            loss, count = group_loss(backbone, trainer.subject.extractor, group, ratio)
            total, tokens = total + loss.item(), tokens + count
        assert scores[f"dev_nll_right{name}"] == pytest.approx(total / tokens, abs=1e-4)
    assert "dev_gap_k2" in scores and "dev_gap_k4" not in scores


def test_wrong_documents_are_never_the_questions_own(backbone):
    question = Question((1,), (0,), (2,), (3,))
    own, same = (Group(((5, 6),), (question,)) for _ in range(2))
    other = Group(((5, 6), (7, 8)), (replace(question, documents=(1, 0)),))
    wrong = _wrong(own, [same, other])
    assert wrong.documents == ((7, 8),) and wrong.questions == (question,)
    with pytest.raises(ConfigError, match="same documents"):
        _wrong(own, [same])


def test_dev_scores_are_logged_with_the_right_and_the_wrong_documents(backbone, recipe):
    trainer = Trainer(recipe(), backbone)
    trainer.train()
    lines = [json.loads(x) for x in (trainer.output / "metrics.jsonl").read_text().splitlines()]
    scored = [line for line in lines if "dev_gap" in line]
    assert [line["step"] for line in scored] == [0, 3, 6]
    for line in scored:
        assert line["dev_gap"] == pytest.approx(line["dev_nll_wrong"] - line["dev_nll_right"])
        assert line["dev_gap"] != 0 and 0 <= line["dev_f1"] <= 100


def test_trackers_of_accelerate_see_every_step(backbone, recipe, tmp_path):
    pytest.importorskip("tensorboard")
    trainer = Trainer(recipe(trackers=("tensorboard",), stages=(Stage(2),)), backbone)
    trainer.train()
    assert list((trainer.output / "c2kv").glob("events.*"))


def test_recipes_load_and_settings_win(data, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: tiny\noutput: out\ndata: [{{source: {data}, weight: 2}}]\n"
        "stages: [{steps: 3}, {steps: 4, mix: {sft: 0.5, reconstruct: 0.5}}]\n"
        "learning_rate: 1e-3\nwarmup_steps: 2\ndocuments: [2, 5]\n"
    )
    recipe = load_recipe(path, ("ratio=8", "ratios=[2, 8]", "clip=2"))
    assert recipe.steps == 7 and recipe.ratio == 8 and recipe.ratios == (2, 8)
    assert recipe.learning_rate == 1e-3 and recipe.documents == (2, 5) and recipe.clip == 2.0
    assert recipe.data == (DataSource(str(data), weight=2.0),)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("learning_rte=1",), "unknown key 'learning_rte'"),
        (("ratio=0",), "ratio 0"),
        (("ratio=four",), "ratio: 'four' is not of the expected type"),
        (("variant=fancy",), "variant 'fancy'"),
        (("stages=[{steps: 0}]",), "0 steps"),
        (("stages=[{steps: 1}",), "is not YAML"),
        (("dtype=float16",), "dtype 'float16'"),
        (("passages=0",), "passages 0"),
        (("learning_rate=-1",), "learning_rate -1.0 trains nothing"),
        (("clip=0",), "clip 0.0 trains nothing"),
        (("warmup_steps=1251",), "must end before the run"),
        (("trackers=[tensorbord]",), "'tensorbord'"),
        (("stages=[{steps: 1, mix: {magic: 1}}]",), "magic"),
        (("data=[{path: x}]",), "unknown key 'path'"),
        (("data=[]",), "needs data"),
        (("nonsense",), "not key=value"),
        (("distill=2",), "distill 2"),
        (("trains=nothing",), "trains 'nothing'"),
        (("schedule=steep",), "schedule 'steep'"),
        (("ratios=[2, 8]",), "ratio 4, the default one"),
        (("anneal=2000",), "must end before the run"),
        (("dev=[{source: x}]", "dev_samples=1"), "dev_samples 1"),
        (("trains=block", "distill=0.5"), "distill is for training extractors"),
    ],
)
def test_wrong_recipes_say_what_is_wrong(tmp_path, change, says):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: tiny\noutput: out\ndata: [{source: x}]\n")
    with pytest.raises(ConfigError, match=says):
        load_recipe(path, change)
    path.write_text("model: tiny\noutput: out\n")
    with pytest.raises(ConfigError, match="'data' is missing"):
        load_recipe(path)
    with pytest.raises(ConfigError, match="cannot read recipe"):
        load_recipe(tmp_path / "gone.yaml")


def test_the_recipes_in_the_box_are_valid():
    paths = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))
    assert paths and all(load_recipe(path).steps > 0 for path in paths)


def test_dev_answers_are_read_from_their_documents_in_order(backbone, data, recipe, monkeypatch):
    sampler = sampler_of(backbone, data, documents=(2, 3), questions=1)
    groups = [sampler.qa(index) for index in range(10)]
    subject = Trainer(recipe(), backbone).subject
    asked = []

    def answers(compositions, questions, options):
        """The expected answers, but for the first of each batch."""
        some = groups[len(asked) : len(asked) + len(questions)]
        asked.extend(questions)
        for group, composition in zip(some, compositions, strict=True):
            (q,) = group.questions
            joined = [*q.prefix, *(t for i in q.documents for t in group.documents[i])]
            assert composition.token_ids == joined
        found = [Decoded(list(g.questions[0].answer[:-1])) for g in some]
        found[0] = Decoded(backbone.tokenizer("no such thing").input_ids)
        return found, None

    monkeypatch.setattr("c2kv.training.dev.decode", answers)
    scores = dev_scores(backbone, subject, sampler.template, groups, [4])
    assert asked == [group.questions[0].question for group in groups]
    assert scores["dev_f1"] == pytest.approx(80)  # two batches, one miss each
