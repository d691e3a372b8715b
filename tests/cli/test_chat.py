"""One question from a script, and a conversation at a terminal."""

from __future__ import annotations

from tripool import LLM, SamplingParams
from tripool.cli.terminal import harmless
from tripool.core import TokenEvent
from tripool.engine.fake import fake_text
from tripool.engine.fake_paged import PagedFake


def expected(*contents: str, system: str | None = None, **options: int) -> str:
    """Messages of user and assistant, alternating."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    with LLM(PagedFake(fake_text())) as llm:
        return llm.chat(messages, SamplingParams(**options))[0].text


def test_question_as_argument(tripool):
    ran = tripool("chat", "fake", "Which pool?", "--seed", "3", "--system", "Be brief.")
    assert ran.code == 0
    assert ran.out == expected("Which pool?", seed=3, system="Be brief.") + "\n"
    assert "tokens/s" in ran.err


def test_drafts_can_be_switched_off(tripool, models):
    for flags in ((), ("--no-mtp",), ("--mtp",)):
        assert tripool("chat", "fake", "hello", *flags).code == 0
    assert [config.mtp for _, config in models.loaded] == [True, False, True]


def test_question_from_a_pipe(tripool):
    ran = tripool("chat", "--seed", "3", "--max-tokens", "5", stdin="Which\npool?\n")
    assert ran.out == expected("Which\npool?", seed=3, max_tokens=5) + "\n"


def test_conversation_keeps_its_history(tripool):
    typed = "first\n\n/what\nsecond\n/reset\nfirst\n/exit\nnever asked\n"
    ran = tripool("chat", "fake", "--seed", "3", stdin=typed, tty=True)
    first = expected("first", seed=3)
    second = expected("first", first, "second", seed=3)
    assert ran.code == 0
    assert (ran.out.count(first), ran.out.count(second)) == (2, 1)
    assert "known: /reset, /exit" in ran.out
    assert ran.err.count("tokens/s") == 3


def test_end_of_input_leaves(tripool):
    assert tripool("chat", "fake", stdin="", tty=True).code == 0


def test_a_full_context_is_said_and_survived(tripool):
    ran = tripool("chat", "fake", "--seed", "3", stdin=f"{'x' * 3000}\nshort\n", tty=True)
    assert ran.code == 0
    assert "the prompt has" in ran.err
    assert expected("short", seed=3) in ran.out


class InterruptedEngine(PagedFake):
    """Ctrl-C in the fourth step."""

    num_steps = 0

    def step(self) -> list[TokenEvent]:
        self.num_steps += 1
        if self.num_steps == 4:
            raise KeyboardInterrupt
        return super().step()


def test_interrupt_ends_the_answer_and_not_the_conversation(tripool, models, monkeypatch):
    engine = InterruptedEngine(fake_text())
    monkeypatch.setattr(models, "load", lambda model, config: engine)
    ran = tripool("chat", "fake", "--seed", "3", stdin="first\nsecond\n", tty=True)
    assert ran.code == 0
    part = expected("first", seed=3, max_tokens=3)
    assert part in ran.out
    assert expected("first", part, "second", seed=3) in ran.out
    assert not engine.open_requests


def test_interrupt_of_a_script_exits(tripool, models, monkeypatch):
    engine = InterruptedEngine(fake_text())
    monkeypatch.setattr(models, "load", lambda model, config: engine)
    assert tripool("chat", "fake", "question").code == 130
    assert not engine.open_requests


def test_harmless():
    assert harmless("a\x1b[31mb\a\n\tc\x9b1md\r") == "a[31mb\n\tc1md"
