"""LongBench's own metrics.py and eval.py on predictions, for `jaxkv.evaluation.scorers`.

    python tests/oracle/make_longbench.py PATH/TO/LongBench    # a checkout of THUDM/LongBench at 2e00731

It needs rouge 1.0.1, jieba 0.42.1, fuzzywuzzy 0.18.0 and python-Levenshtein 0.27.1, without which fuzzywuzzy falls back
to difflib, another measure. Predictions and references are ours; each task's are scored as eval.py does.
"""

import json
import random
import sys
from pathlib import Path

GOLDENS = Path(__file__).parent.parent / "goldens"
ENGLISH = (
    "The harbour master, who keeps the tide tables, closed the north gate at seven.",
    "Seven ships waited; an old ferry did not.",
    "the north gate",
    "A lamp. An anchor? The bell!",
    "It was Anna's boat - the one with 2 red sails - that came first.",
    "42",
    "yes",
    "unanswerable",
    "The market opens on Monday and on Thursday, but not in the winter months.",
)
CHINESE = (
    "港务长在七点关闭了北门。",
    "七艘船在等待，一艘旧渡轮没有等。",  # noqa: RUF001
    "北门",
    "市场在星期一和星期四开放，冬天除外。",  # noqa: RUF001
    "教育",
    "红帆船2号先到达——安娜的船。",
)
CODE = (
    "    return self.width * self.height",
    "        if value is None:",
    "for name in names:",
    "public static int count(String text) {",
    "x += 1  # next",
    "`x`",
    "// a comment",
    "",
    "        else:",
)
CLASSES = (
    "Date",
    "City",
    "Other location",
    "Other number",
    "Number of something",
    "Number",
    "Description",
    "教育",
    "政治",
)
KINDS = {  # task -> texts, references
    "qasper": (ENGLISH, ENGLISH), "triviaqa": (ENGLISH, ENGLISH), "gov_report": (ENGLISH, ENGLISH),
    "samsum": (ENGLISH, ENGLISH), "multifieldqa_zh": (CHINESE, CHINESE), "vcsum": (CHINESE, CHINESE),
    "trec": (CLASSES, CLASSES), "lsht": (CLASSES, CLASSES), "lcc": (CODE, [text for text in CODE if text]),
    "passage_count": (["1", "2", "3", "7", "12", "30", "none"], ["2", "7", "12"]),
    "passage_retrieval_en": (["Paragraph 7", "Paragraph 12", "7", "paragraph 7"], ["Paragraph 7", "Paragraph 12"]),
    "passage_retrieval_zh": (["段落7", "段落12", "7", "段落 70", "不"], ["段落7", "段落12"]),
}  # fmt: skip


def predictions(rng: random.Random, texts: tuple, references: tuple) -> tuple[str, list[str]]:
    """A prediction of some lines, made of texts and parts of them, and one to three references."""
    lines = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        words = rng.choice(texts)
        if rng.random() < 0.4:
            half = len(words) // 2
            words = rng.choice((words[:half], words[half:], words.upper(), f"The {words}, {rng.choice(texts)}"))
        lines.append(words)
    said = rng.choice(("", "\n", "\n\n")) + rng.choice(("\n", " ")).join(lines) + rng.choice(("", "\n", "."))
    return said, rng.sample(list(references), rng.randint(1, min(3, len(references))))


def main() -> None:
    sys.path.insert(0, sys.argv[1] + "/LongBench")
    import eval as official

    rng, out = random.Random(0), []
    for task, (texts, references) in KINDS.items():
        for _ in range(40):
            said, wanted = predictions(rng, texts, references)
            official_score = 0.0
            kept = said.lstrip("\n").split("\n")[0] if task in ("trec", "triviaqa", "samsum", "lsht") else said
            for reference in wanted:
                official_score = max(
                    official_score, official.dataset2metric[task](kept, reference, all_classes=list(CLASSES))
                )
            assert abs(100 * official_score - official.scorer(task, [said], [wanted], list(CLASSES))) < 0.006
            out.append({"task": task, "prediction": said, "references": wanted, "score": official_score})
    told = {"classes": CLASSES, "cases": out}
    (GOLDENS / "longbench.json").write_text(json.dumps(told, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    for task in KINDS:
        scores = [case["score"] for case in out if case["task"] == task]
        assert len({round(score, 3) for score in scores}) > 2, task
        print(task, sum(scores) / len(scores))


if __name__ == "__main__":
    main()
