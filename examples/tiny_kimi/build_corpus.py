"""Text of the tiny checkpoint: four domains, one tokenizer, a split by file.

    python build_corpus.py WORK --python-doc DIR --postgres-doc DIR [--stdlib DIR]

The idea: a quantizer is judged by what it does to a model that has learned something, on text that the model has
not seen. So the corpus is real text under permissive licences, and whole files are held out, never slices of them.

    domain         what it is                                              source
    python-doc     reStructuredText sources of the Python documentation    Debian python3.11-doc
    stdlib-py      source code of the Python standard library              the running interpreter, or --stdlib
    postgres-doc   text of the PostgreSQL manual                           Debian postgresql-doc-15
    chat           conversations made from the Python documentation        python-doc, same split

A document ends with the literal text `[EOS]`, which the tokenizer reads as one token; the files can therefore be
tokenized as they lie. Changes made to the sources: markup of web pages and author lines are removed, and every e-mail
address becomes `user@example.org`.

Written:

    WORK/corpus/{domain}.{train,heldout}.npy   uint16 token ids; held-out means: no file of it was trained on
    WORK/corpus/stats.json                     bytes, tokens and SHA-256 of every text
    here: heldout/{domain}.txt                 the held-out text, about 75 KB for each domain
    here: calibration.txt                      about 600 KB of training text, in the proportions of training
    here: master/tokenizer.json                byte-level BPE, 2048 entries, Kimi K2's special tokens at the end

Deterministic: order comes from SHA-256 of names, never from a random generator or the file system.
"""

import argparse
import hashlib
import json
import re
import sysconfig
from pathlib import Path

import numpy as np
from bs4 import BeautifulSoup
from chat import chat_documents, order
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
END_OF_DOCUMENT = "[EOS]"

# Share of each domain in a training batch and in calibration.txt.
MIXTURE = {"python-doc": 0.32, "stdlib-py": 0.30, "postgres-doc": 0.26, "chat": 0.12}
HELDOUT_BYTES = 75_000  # written per domain
RESERVED_BYTES = 220_000  # kept out of training per domain; more than is written, so that held-out chat has material
CALIBRATION_BYTES = 600_000

VOCAB_SIZE = 2048
SPECIAL_TOKENS = [
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "[EOT]",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "[UNK]",
    "[PAD]",
]
# Words keep their leading space, digits go in threes, runs of blank space stay whole (indentation of code).
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

STDLIB_LEFT_OUT = re.compile(
    r"(^|/)(site-packages|test|tests|idlelib|lib2to3|encodings|pydoc_data|turtledemo|ensurepip|config-[^/]*|lib-dynload)/"
    r"|^_sysconfigdata"
)


def clean(text: str) -> str:
    """Plain text with bounded blank space, without control characters and without anybody's address."""
    text = text.replace("\r\n", "\n").replace("\x0c", "\n").replace("\xa0", " ")
    text = "".join(c for c in text if c in "\n\t" or ord(c) >= 32)
    text = re.sub(r"(?m)^.*(module|section)author::.*\n", "", text)
    text = re.sub(r"[\w.+-]+@[\w-]+(\.[\w-]+)+", "user@example.org", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def page_text(path: Path) -> str:
    """Text of one page of the PostgreSQL manual, without its navigation."""
    soup = BeautifulSoup(path.read_bytes(), "lxml")
    for tag in soup(["script", "style", "head"]) + soup.select(".navheader, .navfooter, .toc"):
        tag.decompose()
    return soup.get_text("")


def read_domain(root: Path, pattern: str, read) -> dict[str, str]:
    """{name: cleaned text} of the files under root, without repeats and without texts that are not mostly ASCII."""
    documents, seen = {}, set()
    for path in sorted(root.rglob(pattern)):
        name = path.relative_to(root).as_posix()
        if STDLIB_LEFT_OUT.search(name) or name.startswith("whatsnew/changelog"):
            continue
        text = clean(read(path))
        mostly_ascii = sum(ord(c) < 128 for c in text) > 0.97 * len(text)
        if len(text) > 400 and mostly_ascii and text not in seen:
            seen.add(text)
            documents[name] = text
    return documents


def split(documents: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(train, held out). Files above 40 KB always train: one of them would fill the held-out text alone."""
    train, heldout, size = {}, {}, 0
    for name in sorted(documents, key=order):
        if size < RESERVED_BYTES and len(documents[name]) <= 40_000:
            heldout[name] = documents[name]
            size += len(documents[name].encode())
        else:
            train[name] = documents[name]
    return train, heldout


# ------------------------------------------------------------------------------------------------------ tokenizer


def train_tokenizer(texts: dict[str, str]) -> Tokenizer:
    """Byte-level BPE over 1.5 MB of each domain; the special tokens take the last ids, as in Kimi K2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    special = re.compile("|".join(re.escape(t) for t in SPECIAL_TOKENS))
    pieces = (special.sub("\n", text[i : i + 50_000]) for text in texts.values() for i in range(0, 1_500_000, 50_000))
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "added_tokens_decoder": {str(tokenizer.token_to_id(t)): {"content": t} | plain for t in SPECIAL_TOKENS},
        "additional_special_tokens": [t for t in SPECIAL_TOKENS if t.startswith("<|im_")],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


# ----------------------------------------------------------------------------------------------------------- main


def joined(documents: dict[str, str], limit: int | None = None) -> str:
    """Documents in shuffled order, each ended by [EOS]; whole documents until `limit` bytes are passed."""
    parts, size = [], 0
    for name in sorted(documents, key=order):
        if limit and size >= limit:
            break
        parts.append(documents[name] + END_OF_DOCUMENT)
        size += len(parts[-1].encode())
    text = "".join(parts)
    return text if not limit else text.encode()[: int(limit * 1.05)].decode(errors="ignore")


def calibration_text(train: dict[str, dict[str, str]]) -> str:
    """Training documents, cut to 5 KB so that many files speak, interleaved in the proportions of MIXTURE."""
    chosen = []
    for domain, share in MIXTURE.items():
        names, size, taken = sorted(train[domain], key=lambda n: order("calibration" + n)), 0, []
        for name in names:
            if size >= CALIBRATION_BYTES * share:
                break
            taken.append(train[domain][name][:5000] + END_OF_DOCUMENT)
            size += len(taken[-1].encode())
        chosen += [((i + 0.5) / len(taken), text) for i, text in enumerate(taken)]
    return "".join(text for _, text in sorted(chosen, key=lambda c: c[0]))


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Token ids, uint16 [tokens]; encoded document by document, which changes nothing and bounds memory."""
    documents = [d + END_OF_DOCUMENT for d in text.split(END_OF_DOCUMENT)]
    documents[-1] = documents[-1].removesuffix(END_OF_DOCUMENT)
    return np.concatenate([np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(documents)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=Path, help="folder for token files")
    parser.add_argument("--python-doc", type=Path, required=True, help="the `_sources` folder of python3.11-doc")
    parser.add_argument("--postgres-doc", type=Path, required=True, help="the `html` folder of postgresql-doc-15")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    args = parser.parse_args()

    source_text = lambda path: path.read_text(encoding="utf-8", errors="replace")  # noqa: E731
    train, heldout = {}, {}
    train["python-doc"], heldout["python-doc"] = split(read_domain(args.python_doc, "*.txt", source_text))
    train["stdlib-py"], heldout["stdlib-py"] = split(read_domain(args.stdlib, "*.py", source_text))
    train["postgres-doc"], heldout["postgres-doc"] = split(read_domain(args.postgres_doc, "*.html", page_text))
    for part in (train, heldout):
        part["chat"] = chat_documents(part["python-doc"])

    texts = {d: joined(train[d]) for d in MIXTURE}
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, HERE / "master")

    (args.work / "corpus").mkdir(parents=True, exist_ok=True)
    (HERE / "heldout").mkdir(exist_ok=True)
    stats = {}
    for domain in MIXTURE:
        held = joined(heldout[domain], HELDOUT_BYTES)
        (HERE / "heldout" / f"{domain}.txt").write_text(held)
        for part, text in (("train", texts[domain]), ("heldout", held)):
            ids = encode(tokenizer, text)
            np.save(args.work / "corpus" / f"{domain}.{part}.npy", ids)
            data = text.encode()
            stats[f"{domain}.{part}"] = {
                "bytes": len(data), "tokens": len(ids), "bytes_per_token": round(len(data) / len(ids), 3),
                "sha256": hashlib.sha256(data).hexdigest(),
            }  # fmt: skip
            print(domain, part, stats[f"{domain}.{part}"], flush=True)
    (HERE / "calibration.txt").write_text(calibration_text(train))
    (args.work / "corpus" / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")


if __name__ == "__main__":
    main()
