"""IFEval (Zhou et al. 2023): does an answer follow the instructions that can be checked?

The checks are those of google-research ``instruction_following_eval``, except that they need no downloads: sentences
are told apart by a rule where the original uses NLTK's trained Punkt, and capital words by a pattern where it uses
NLTK's tokenizer. A letter to be counted may be any sign, where the original replaces one that is
no letter by a random letter. ``langdetect`` tells the language of a text, with its seed fixed, so that a verdict stays.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UsageError
from ...files import shown
from .reference import read_reference

Given = Mapping[str, Any]
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
NO_BREAK = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|Inc|Ltd|Co|No|e\.g|i\.e|cf|al|Fig|approx)|\b[A-Z]|(?:^|\n)\s*\d+)\.$"
)
SENTENCE_END = re.compile(r"[.!?]+[\"'”’)\]*]*(?=\s)")
CAPITAL_WORD = re.compile(r"[^\W_]+(?:[-./&][^\W_]+)*|'[^\W_]+")


def check_supported() -> None:
    """Refuse to start without the package that tells languages.

    Raises
    ------
    UsageError
    """
    try:
        import langdetect  # noqa: F401
    except ImportError:
        raise UsageError(
            "ifeval tells languages by the package langdetect, which is not installed",
            fix="pip install 'asdsim[quality]'",
        ) from None


def _compare(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == "less than" else count >= threshold


def _language(text: str) -> str | None:
    """Return the language of a text; None where it cannot be told, which counts as followed."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


def sentences(text: str) -> int:
    """Count sentences: ends of one are ., ! or ? before white space, unless an abbreviation or a list number."""
    ends, begin = 0, 0
    for mark in SENTENCE_END.finditer(text):
        after = text[mark.end() :].lstrip()[:1]
        full_stop = set(mark.group()) == {"."}
        if not after or (full_stop and (after.islower() or NO_BREAK.search(text[begin : mark.end()]))):
            continue
        ends, begin = ends + 1, mark.end()
    return ends + bool(text[begin:].strip())


def _separated(text: str, separator: str) -> list[str] | None:
    """Return the parts between separators; None where one in the middle is empty."""
    parts = re.split(separator, text)
    if any(not part.strip() for part in parts[1:-1]):
        return None
    return [part for part in parts if part.strip()]


def _highlights(text: str, given: Given) -> bool:
    single = (match.strip("*").strip() for match in re.findall(r"\*[^\n\*]*\*", text))
    double = (match[2:-2].strip() for match in re.findall(r"\*\*[^\n\*]*\*\*", text))
    return sum(map(bool, [*single, *double])) >= given["num_highlights"]


def _first_word(text: str, given: Given) -> bool:
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    nth = given["nth_paragraph"]
    if nth > count or not parts[nth - 1].strip():
        return False
    word = parts[nth - 1].split()[0].lstrip("'").lstrip('"')
    first = re.split(r"[.,?!'\"]", word)[0].lower()
    return bool(count == given["num_paragraphs"] and first == given["first_word"].lower())


def _postscript(text: str, given: Given) -> bool:
    patterns = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    marker = given["postscript_marker"]
    return bool(re.search(patterns.get(marker, rf"\s*{marker.lower()}.*$"), text.lower(), re.MULTILINE))


def _json(text: str, given: Given) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _bullets(text: str, given: Given) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == given["num_bullets"]


def _two_responses(text: str, given: Given) -> bool:
    parts = _separated(text, r"\*{6}")
    return parts is not None and len(parts) == 2 and parts[0].strip() != parts[1].strip()


def _capital_words(text: str, given: Given) -> bool:
    count = sum(word.isupper() for word in CAPITAL_WORD.findall(text))
    return _compare(count, given["capital_relation"], given["capital_frequency"])


def _frequency(text: str, given: Given) -> bool:
    count = len(re.findall(given["keyword"], text, re.IGNORECASE))
    return _compare(count, given["relation"], given["frequency"])


def _sections(text: str, given: Given) -> bool:
    return len(re.split(rf"\s?{given['section_spliter']}\s?\d+\s?", text)) - 1 >= given["num_sections"]


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


CHECKS: dict[str, Callable[[str, Given], bool]] = {
    "keywords:existence": lambda text, given: all(_found(word, text) for word in given["keywords"]),
    "keywords:forbidden_words": lambda text, given: (
        not any(_found(rf"\b{word}\b", text) for word in given["forbidden_words"])
    ),
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": lambda text, given: _compare(
        Counter(text.lower())[given["letter"].lower()], given["let_relation"], given["let_frequency"]
    ),
    "language:response_language": lambda text, given: _language(text) in (given["language"], None),
    "length_constraints:number_sentences": lambda text, given: _compare(
        sentences(text), given["relation"], given["num_sentences"]
    ),
    "length_constraints:number_paragraphs": lambda text, given: (
        len(_separated(text, r"\s?\*\*\*\s?") or ()) == given["num_paragraphs"]
    ),
    "length_constraints:number_words": lambda text, given: _compare(
        len(re.findall(r"\w+", text)), given["relation"], given["num_words"]
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda text, given: (
        len(re.findall(r"\[.*?\]", text)) >= given["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda text, given: any(answer in text for answer in CONSTRAINED),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda text, given: any(
        title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text)
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, given: (
        text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda text, given: (
        text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())
    ),
    "startend:quotation": lambda text, given: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text, given: text.isupper() and _language(text) in ("en", None),
    "change_case:english_lowercase": lambda text, given: text.islower() and _language(text) in ("en", None),
    "punctuation:no_comma": lambda text, given: "," not in text,
}
"""By the data set's names of instructions; each is handed a text that is not blank, and the instruction's arguments."""


def _loosened(text: str) -> list[str]:
    """Return the text as the loose reading takes it: without its first or last line, or both, and without asterisks."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cut, *(part.replace("*", "") for part in cut)]


def followed(text: str, reference: str, *, loose: bool = False) -> list[bool]:
    """Tell of each instruction whether a text follows it.

    Parameters
    ----------
    text : str
        The answer.
    reference : str
        JSON with ``instructions`` (names) and ``arguments`` (an object each).
    loose : bool
        Whether one of the loosened texts has to follow it, instead of the text.

    Raises
    ------
    UsageError
        On an instruction that is not known, or a reference of another form.
    """
    task = read_reference(reference)
    names, arguments = task.list_of("text", "instructions"), task.get("arguments")
    if not isinstance(arguments, list) or len(arguments) != len(names):
        task.refuse("arguments", "a list with one object for each instruction")
    texts = [variant for variant in (_loosened(text) if loose else [text]) if variant.strip()]
    verdicts = []
    for name, given in zip(names, arguments, strict=True):
        if name not in CHECKS:
            raise UsageError(f"ifeval has no instruction {shown(name)!r}", fix="use the prompts of google/IFEval")
        try:
            verdicts.append(any(CHECKS[name](variant, given) for variant in texts))
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            re.error,
        ):  # the arguments are the user's
            task.refuse("arguments", f"what instruction {name} takes")
    return verdicts


def score(text: str, reference: str | None) -> bool:
    """Tell whether an answer follows all instructions of its prompt, strictly."""
    return all(followed(text, reference or ""))
