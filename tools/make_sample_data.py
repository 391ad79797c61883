"""Writes the sample corpora of ``datasets_gpt/`` and ``datasets_bert/`` and their vocabularies.

A grammar and a seed produce the text, so it belongs to nobody else and can be made again byte for
byte. It describes three hundred invented people who each have one job, town, animal and dish. All
documents agree on these facts, so a model of a few layers learns spelling and phrases first, then
the facts and the sums.

The committed files are the output of::

    python tools/make_sample_data.py gpt --output-dir datasets_gpt
    python tools/make_sample_data.py bert --output-dir datasets_bert

``chat`` writes chats for ``train --sft`` instead, ``chats.jsonl`` without a vocabulary.

Each run also trains a vocabulary with the ``tokenizers`` package. WordPiece training breaks ties at
random, so a new ``vocab.txt`` may differ from the committed one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

END_OF_TEXT = "<|endoftext|>"
BERT_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


_FILE = Path(__file__).with_name("sample_words.yaml")
WORDS = SimpleNamespace(**yaml.safe_load(_FILE.read_text(encoding="utf-8")))
NUM_PEOPLE = 300
NUM_WOMEN = 25
"""The first of the given names are women's."""


@dataclass(frozen=True)
class Person:
    """One inhabitant; every document that mentions the name agrees with these facts."""

    name: str
    she: bool
    job: str
    town: str
    animal: str
    dish: str

    @property
    def he(self) -> str:
        return "she" if self.she else "he"

    @property
    def his(self) -> str:
        return "her" if self.she else "his"


def make_people(rng: random.Random) -> list[Person]:
    """Draws ``NUM_PEOPLE`` different names, and facts for each."""
    pairs = list(itertools.product(WORDS.given_names, WORDS.family_names))
    women, dishes = WORDS.given_names[:NUM_WOMEN], list(WORDS.ingredients)
    return [
        Person(
            name=f"{given} {family}",
            she=given in women,
            job=rng.choice(WORDS.jobs),
            town=rng.choice(WORDS.towns),
            animal=rng.choice(WORDS.animals),
            dish=rng.choice(dishes),
        )
        for given, family in rng.sample(pairs, NUM_PEOPLE)
    ]


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def portrait(rng: random.Random, people: list[Person]) -> list[str]:
    """Facts about one person."""
    who = rng.choice(people)
    day, place = rng.choice(WORDS.days), rng.choice(WORDS.places)
    sentences = [
        f"{who.name} is a {who.job} in {who.town}.",
        f"{capital(who.he)} has a {who.animal} and likes {who.dish} more than anything else.",
        f"Everyone in {who.town} knows {who.name}, because {who.he} is the best {who.job} there.",
        f"On {day} {who.he} takes {who.his} {who.animal} to the {place}.",
    ]
    if rng.random() < 0.5:
        sentences.append(f"In the evening {who.he} cooks {who.dish} and reads a book.")
    return sentences


def shopping_sum(rng: random.Random, people: list[Person]) -> list[str]:
    """Additions and subtractions whose results are always right."""
    who = rng.choice(people)
    goods = rng.choice(WORDS.goods)
    count = rng.randint(2, 30)
    sentences = [f"{who.name} the {who.job} has {count} {goods}."]
    for _ in range(rng.randint(2, 5)):
        change = rng.randint(2, 12)
        if rng.random() < 0.5 and change <= count - 2:
            other = rng.choice(people)
            count -= change
            sentences.append(
                f"{capital(who.he)} gives {change} {goods} to {other.name} of {other.town}."
            )
        else:
            count += change
            sentences.append(
                f"{capital(who.he)} buys {change} more {goods} at the {rng.choice(WORDS.places)}."
            )
        sentences.append(f"Now {who.he} has {count} {goods}.")
    return sentences


def errand(rng: random.Random, people: list[Person]) -> list[str]:
    """Two people, a thing that is carried and a journey."""
    sender, receiver = rng.sample(people, 2)
    goods = rng.choice(WORDS.goods)
    weather = rng.choice(WORDS.weathers)
    sentences = [
        f"{sender.name}, the {sender.job} of {sender.town}, had some {goods} for {receiver.name}.",
        f"The road to {receiver.town} was long, and there was {weather} all day.",
        f'"I will go myself," said {sender.name}, and took {sender.his} {sender.animal} along.',
        f"In {receiver.town} {receiver.name} the {receiver.job} opened the door.",
        f'"You came through the {weather}!" said {receiver.name}.',
        f'"Sit down and have some {receiver.dish}."',
        f"The {sender.animal} and the {receiver.animal} slept by the fire.",
    ]
    if rng.random() < 0.5:
        sentences.append(
            f"The next morning {sender.name} went home to {sender.town} without the {goods}."
        )
    return sentences


def recipe(rng: random.Random, people: list[Person]) -> list[str]:
    """A dish always has the same ingredients in the same order."""
    who = rng.choice(people)
    first, second, third = WORDS.ingredients[who.dish]
    minutes = rng.choice((10, 15, 20, 30, 45))
    return [
        f"This is how {who.name} of {who.town} makes {who.dish}.",
        f"First {who.he} takes the {first} and washes the bowl.",
        f"Then {who.he} adds the {second} and stirs slowly.",
        f"At last {who.he} adds the {third} and waits for {minutes} minutes.",
        f"Then the {who.dish} is ready, and {who.his} {who.animal} gets the rest.",
    ]


def diary(rng: random.Random, people: list[Person]) -> list[str]:
    """A run of consecutive days in a month."""
    who = rng.choice(people)
    day, month = rng.randrange(7), rng.choice(WORDS.months)
    date = rng.randint(1, 22)
    sentences = [f"A week in {month}, written down by {who.name} the {who.job}."]
    for step in range(rng.randint(3, 6)):
        task = rng.choice(
            (
                f"I went to the {rng.choice(WORDS.places)}",
                f"I cooked {who.dish}",
                f"there was {rng.choice(WORDS.weathers)} in {who.town}",
                f"my {who.animal} ran away and came back",
                f"I counted {rng.randint(2, 30)} {rng.choice(WORDS.goods)}",
            )
        )
        sentences.append(f"{WORDS.days[(day + step) % 7]}, {month} {date + step}: {task}.")
    return sentences


def timetable(rng: random.Random, people: list[Person]) -> list[str]:
    """A coach that stops at neighbouring towns at even intervals."""
    start, stride = rng.randrange(len(WORDS.towns)), rng.choice((5, 10, 15, 20))
    minute, hour = 0, rng.randint(6, 15)
    driver = rng.choice(people)
    sentences = [f"The coach of {driver.name} leaves {WORDS.towns[start]} at {hour}:00."]
    for stop in range(1, rng.randint(4, 7)):
        minute += stride
        town = WORDS.towns[(start + stop) % len(WORDS.towns)]
        sentences.append(f"It stops in {town} at {hour + minute // 60}:{minute % 60:02d}.")
    sentences.append(f"The way takes {minute} minutes, {stride} from one town to the next.")
    return sentences


KINDS: tuple[Callable[[random.Random, list[Person]], list[str]], ...] = (
    portrait,
    shopping_sum,
    errand,
    recipe,
    diary,
    timetable,
)


def make_documents(num_documents: int, seed: int) -> Iterator[dict[str, str]]:
    """Yields documents with the fields ``src``, ``text``, ``type``, ``id`` and ``title``."""
    rng = random.Random(seed)
    people = make_people(rng)
    for number in range(num_documents):
        kind = rng.choice(KINDS)
        text = " ".join(kind(rng, people))
        yield {
            "src": "megatron-dpp-sample",
            "text": text,
            "type": "Eng",
            "id": str(number),
            "title": f"{kind.__name__.replace('_', ' ')} {number}",
        }


QUESTIONS = (
    "What do you know about {name}?",
    "Tell me about {name} of {town}.",
    "Who is {name}, and what happens in {town}?",
)


def make_chats(
    num_chats: int, seed: int, *, median: int = 60, sigma: float = 1.0
) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Yields chats of one to three turns, whose answers have a lognormal number of words.

    Args:
        median, sigma: of the words of all answers of a chat, 2,000 at most.
    """
    rng = random.Random(seed)
    people = make_people(rng)
    for _ in range(num_chats):
        words = max(1, min(2000, round(median * math.exp(rng.gauss(0.0, sigma)))))
        turns = rng.randint(1, min(3, words))
        messages = [{"role": "system", "content": "You know everybody."}] * rng.randint(0, 1)
        for turn in range(turns):
            who = rng.choice(people)
            question = rng.choice(QUESTIONS).format(name=who.name, town=who.town)
            answer: list[str] = []
            share = words * (turn + 1) // turns - words * turn // turns
            while len(answer) < share:
                answer += " ".join(rng.choice(KINDS)(rng, people)).split()
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": " ".join(answer[:share])})
        yield {"messages": messages}


def write_jsonl(path: Path, documents: list[Any]) -> None:
    lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents]
    path.write_text("".join(lines), encoding="utf-8")


def train_gpt_vocabulary(texts: list[str], output_dir: Path, vocab_size: int) -> None:
    """Byte-level BPE; writes ``vocab.json`` and ``merges.txt`` as GPT-2 has them."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocab_size - 1, show_progress=False)
    tokenizer.save_model(str(output_dir))
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    vocabulary[END_OF_TEXT] = len(vocabulary)
    ordered = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    (output_dir / "vocab.json").write_text(json.dumps(ordered) + "\n", encoding="utf-8")


def train_bert_vocabulary(texts: list[str], output_dir: Path, vocab_size: int) -> None:
    """Lower-cased WordPiece; writes ``vocab.txt`` with BERT's special tokens first."""
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        texts,
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(BERT_SPECIAL_TOKENS),
    )
    tokenizer.save_model(str(output_dir))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", choices=("gpt", "bert", "chat"), help="whose sample to write")
    parser.add_argument(
        "--output-dir", type=Path, required=True, help="folder for corpus and vocabulary"
    )
    parser.add_argument("--num-documents", type=int, help="default: 5000 for gpt, 2500 for others")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--seed", type=int, help="default: 1 for gpt, 2 for others")
    parser.add_argument("--median-words", type=int, default=60, help="of a chat's answers")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the lognormal words")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    is_gpt = args.model == "gpt"
    num_documents = args.num_documents or (5000 if is_gpt else 2500)
    seed = args.seed if args.seed is not None else (1 if is_gpt else 2)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if args.model == "chat":
        chats = make_chats(num_documents, seed, median=args.median_words, sigma=args.sigma)
        write_jsonl(args.output_dir / "chats.jsonl", list(chats))
        print(f"{num_documents} chats written to {args.output_dir / 'chats.jsonl'}")
        return
    documents = list(make_documents(num_documents, seed))
    write_jsonl(args.output_dir / "dataset.json", documents)
    train = train_gpt_vocabulary if is_gpt else train_bert_vocabulary
    train([document["text"] for document in documents], args.output_dir, args.vocab_size)
    print(f"{num_documents} documents and their vocabulary written to {args.output_dir}")


if __name__ == "__main__":
    main()
