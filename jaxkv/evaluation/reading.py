"""Tasks on running text: questions about the prose, a long conversation, a long output.

Every function gives `build(n)`: the example with n words of filling, all else the same. The wording is ours.
"""

import random
from collections.abc import Callable

from jaxkv.evaluation import texts
from jaxkv.evaluation.example import Example, Question

Build = Callable[[int], Example]

# (paragraph of the prose that holds the answer, question, answers)
READING = (
    (0, "Which way does the harbour at Wick End face?", ("north",)),
    (1, "Who keeps a second print of the old photograph in a drawer?", ("librarian",)),
    (2, "What do the men leave out when they talk over the radio?", ("last word",)),
    (3, "Who bought the ropewalk?", ("Ines Harrow", "Ines")),
    (4, "What kind of family does the apprentice come from?", ("trawler",)),
    (5, "Who cleared the old quarry to make a garden?", ("teacher",)),
    (6, "Which subject was the rule on whose paint wore away about?", ("dog",)),
    (7, "What stands in place of a tower beside the porch of the present church?", ("bell", "frame")),
    (8, "In which month does the town hold its market?", ("September",)),
    (9, "What did Ines build that winter and give to the harbour master?", ("boat",)),
    (10, "For how many weeks does the man from the university live in a shed?", ("six",)),
    (11, "What was in the parcel that was delivered to the last keeper?", ("boots",)),
    (12, "Which list does the keeper say is much harder to make?", ("second", "help")),
    (13, "How many copies of the book will there be?", ("two",)),
)

THINGS_TOLD = (
    "sister's cat",
    "brother's boat",
    "neighbour's dog",
    "grandmother's farm",
    "uncle's tavern",
    "cousin's horse",
    "friend's band",
    "teacher's parrot",
)
NAMES = (
    "Bramble",
    "Clover",
    "Comet",
    "Dapple",
    "Ember",
    "Fennel",
    "Gadget",
    "Hickory",
    "Juniper",
    "Kestrel",
    "Larkspur",
    "Marble",
    "Nimbus",
    "Orbit",
    "Pepper",
    "Quill",
    "Rocket",
    "Sorrel",
    "Thistle",
    "Umbra",
    "Velvet",
    "Willow",
    "Yarrow",
    "Zephyr",
)


def questions_on_text(task: str, rng: random.Random, depth: float, questions: int = 1) -> Build:
    """Questions on one paragraph of the prose among the others, as RULER's QA does with SQuAD (arXiv 2404.06654).

    The paragraph of the first question lies at `depth`; those of further ones follow it.
    """
    chosen = rng.sample(READING, min(questions, len(READING)))
    gold = [texts.paragraphs()[at] for at, _, _ in chosen]
    others = [part for part in texts.paragraphs() if part not in gold]
    rng.shuffle(others)
    asked = tuple(
        Question(f"{text} Answer in a few words, from the passages.", answers, prefix="Answer:", depth=depth)
        for _, text, answers in chosen
    )

    def build(words: int) -> Example:
        parts, left, turn = [], words, 0
        while left > 0 and others:
            part = others[turn % len(others)].split()[:left]
            parts.append(" ".join(part))
            left, turn = left - len(part), turn + 1
        at = round(depth * len(parts))
        parts[at:at] = gold
        text = "\n\n".join(f"Passage {number}:\n{part}" for number, part in enumerate(parts, 1))
        return Example(task, f"Read the following passages.\n\n{text}", asked, "any", 24)

    return build


def conversation(task: str, rng: random.Random, depth: float, questions: int = 1) -> Build:
    """Facts told over a long conversation, asked for at its end: one conversation, many questions.

    Source: the setting of EpiCache (arXiv 2509.17396); the conversation is ours. The first fact is told at `depth` of
    the conversation, further ones evenly over the rest.
    """
    count = min(questions, len(THINGS_TOLD))
    told = list(zip(rng.sample(THINGS_TOLD, count), rng.sample(NAMES, count), strict=True))
    depths = texts.spread(depth, count)
    start = rng.randrange(1000)
    asked = tuple(
        Question(f"What is my {thing} called?", (name,), prefix=f"Your {thing} is called", depth=at)
        for (thing, name), at in zip(told, depths, strict=True)
    )

    def build(words: int) -> Example:
        pages = texts.stream("prose", words, start)
        pages = [" ".join(pages[at : at + 3]) for at in range(0, len(pages), 3)]
        facts = sorted(
            ((round(at * len(pages)), thing, name) for (thing, name), at in zip(told, depths, strict=True)),
            reverse=True,
        )
        chat = [(f"Here is something from my notes: {page}", "I have read it.") for page in pages]
        for at, thing, name in facts:
            chat.insert(at, (f"By the way, my {thing} is called {name}.", "I will remember that."))
        turns = tuple(turn for said, back in chat for turn in (("user", said), ("assistant", back)))
        return Example(task, "Now I have a question.", asked, "all", 16, turns=turns)

    return build


def long_output(task: str, rng: random.Random, facts: int = 3) -> Build:
    """A log that the model is made to write, and at its end a number from the log's first lines.

    Ours, for LongFlow's setting (arXiv 2603.11504): the output is many times the budget. Its tokens run through decode
    one by one under the policy, as if the model had written them, so that all policies write the same. The first half
    of the log mentions the numbers again and again; the second half doesn't.
    """
    names, numbers = texts.names(rng, facts), texts.numbers(rng, facts, digits=4)
    start = rng.randrange(1000)
    question = Question(
        "Write a ship's log. Note the cargo first. At the end, repeat the number of "
        f"the {names[0]} from the first lines.",
        (numbers[0],),
    )
    cargo = "".join(
        f"Cargo: the {name} has the number {number}.\n" for name, number in zip(names, numbers, strict=True)
    )

    def build(words: int) -> Example:
        lines = texts.stream("prose", words, start)
        log = []
        for at, line in enumerate(lines):
            checked = f" Checked the {names[at % facts]}: number {numbers[at % facts]}." if at < len(lines) // 2 else ""
            log.append(f"Entry {at + 1}: {line}{checked}\n")
        output = f"{cargo}{''.join(log)}In the first lines, the {names[0]} has the number"
        return Example(task, "You keep the log of a ship.", (question,), "all", 16, output=output)

    return build
