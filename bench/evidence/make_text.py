#!/usr/bin/env python3
"""Makes a text to train on out of documentation packages of Debian: train.txt and held-out.txt.

  bench/evidence/make_text.py FOLDER [PACKAGE...] [--held-out 0.02] [--jobs 2]
  build/tessera tokenize FOLDER/train.txt --separator %%%% --train FOLDER/bpe.json --vocab-size 8192
  build/tessera tokenize FOLDER/train.txt FOLDER/held-out.txt --separator %%%% --tokenizer FOLDER/bpe.json --output FOLDER/all

Packages come by `apt-get download`, which needs no root, into FOLDER, and are unpacked into FOLDER/unpacked; what is there already is
not fetched or unpacked again. Plain text is taken from .rst, .txt and .html files in English, also compressed (.gz); pages whose source
lies beside them, and pages of source code, lists of uses and indices, are left out. A paragraph of 60 characters or more that came
before, in any document, is dropped. The hash of a document's path says which file it goes to. A document ends with the line `%%%%`, for
--separator and data.separator. Prints documents, bytes and duplicates by package.
"""
import argparse
import concurrent.futures
import gzip
import hashlib
import html.parser
import pathlib
import re
import subprocess
import sys

PACKAGES = ["linux-doc-6.1", "python3.11-doc", "postgresql-doc-15", "cmake-doc", "debian-handbook", "rust-doc", "openjdk-17-doc"]
SEPARATOR = "%%%%"
MIN_DUPLICATE = 60  # characters
MIN_DOCUMENT = 200  # characters
SKIPPED_PARTS = {"src", "class-use", "implementors", "translations", "_static", "_images"}
OTHER_LANGUAGE = re.compile(r"(?!en)[a-z]{2}[-_][A-Z]{2}")
SKIPPED_STEMS = ("genindex", "search", "index-", "allclasses", "allpackages", "overview-tree", "package-tree", "bookindex", "print")


class TextOfPage(html.parser.HTMLParser):
    """Collects the paragraphs of a page; those of <pre> keep their lines."""

    HIDDEN = {"script", "style", "nav", "head", "header", "footer", "button", "noscript", "svg", "template"}
    BLOCKS = {"p", "div", "section", "article", "main", "body", "table", "tr", "ul", "ol", "li", "dl", "dt", "dd", "blockquote",
              "h1", "h2", "h3", "h4", "h5", "h6", "hr", "pre", "details", "summary", "figure", "caption"}  # fmt: skip

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.paragraphs, self.pieces, self.hidden, self.pre, self.language = [], [], 0, 0, ""

    def end_paragraph(self):
        text = "".join(self.pieces)
        self.pieces = []
        text = text.strip("\n") if self.pre else " ".join(text.replace("\u00b6", "").split())
        if text.strip():
            self.paragraphs.append(text)

    def handle_starttag(self, tag, attrs):
        if tag == "html":
            self.language = dict(attrs).get("lang") or dict(attrs).get("xml:lang") or ""
        if tag in self.HIDDEN:
            self.hidden += 1
        if tag in self.BLOCKS:
            self.end_paragraph()
        if tag in ("td", "th", "br"):
            self.pieces.append("\n" if self.pre and tag == "br" else " ")
        self.pre += tag == "pre"

    def handle_endtag(self, tag):
        if tag in self.BLOCKS:
            self.end_paragraph()
        if tag == "pre" and self.pre:
            self.pre -= 1
        if tag in self.HIDDEN and self.hidden:
            self.hidden -= 1

    def handle_data(self, data):
        if not self.hidden:
            self.pieces.append(data)


def paragraphs_of(path):
    """The paragraphs of a document; none where it is not English or not UTF-8."""
    try:
        content = path.read_bytes()
        content = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (UnicodeDecodeError, OSError, EOFError):
        return []
    if ".html" not in path.suffixes[-2:]:
        return [text for text in re.split(r"\n\s*\n", content.replace("\r", "").expandtabs()) if text.strip()]
    page = TextOfPage()
    page.feed(content)
    page.end_paragraph()
    return page.paragraphs if page.language in ("", "en") or page.language.startswith("en-") else []


def is_document(path):
    stem, name = path.name.split(".")[0], path.name.removesuffix(".gz")
    if not name.endswith((".rst", ".txt", ".html")) or path.is_symlink() or not path.is_file():
        return False
    folders = path.parts[:-1]
    if SKIPPED_PARTS.intersection(folders) or any(OTHER_LANGUAGE.fullmatch(part) for part in folders) or stem.startswith(SKIPPED_STEMS):
        return False
    if not name.endswith(".html"):
        return True
    # Sphinx leaves a page's source in _sources.
    return not any((parent / "_sources" / path.relative_to(parent)).with_suffix(".rst.txt").exists() for parent in list(path.parents)[:4])


def unpack(folder, package):
    """The folder with a package's files, fetched where it is not there."""
    target = folder / "unpacked" / package
    if not target.exists():
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        partial = target.with_name(package + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", sorted(folder.glob(f"{package}_*.deb"))[-1], partial], check=True)
        partial.rename(target)
    return target


def hash_of(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Splits:
    """Writes documents to the two files, without paragraphs that came before."""

    def __init__(self, folder, share):
        self.files = {name: (folder / f"{name}.txt").open("w", encoding="utf-8") for name in ("train", "held-out")}
        self.counts = {name: [0, 0] for name in self.files}
        self.seen, self.share = set(), share

    def add(self, name, paragraphs):
        """The numbers of documents, bytes, paragraphs dropped and their bytes."""
        kept, dropped, dropped_bytes = [], 0, 0
        for text in paragraphs:
            normal = " ".join(text.split())
            key = hash_of(normal)
            if len(normal) >= MIN_DUPLICATE and key in self.seen:
                dropped, dropped_bytes = dropped + 1, dropped_bytes + len(text.encode())
                continue
            self.seen.add(key)
            kept.append(text.rstrip())
        text = "\n\n".join(kept).replace(f"\n{SEPARATOR}\n", "\n")
        if len(text) < MIN_DOCUMENT:
            return 0, 0, dropped, dropped_bytes
        split = "held-out" if hash_of(name) < self.share * 2**64 else "train"
        num_bytes = self.files[split].write(f"{text}\n{SEPARATOR}\n") and len(text.encode())
        self.counts[split] = [self.counts[split][0] + 1, self.counts[split][1] + num_bytes]
        return 1, num_bytes, dropped, dropped_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--held-out", type=float, default=0.02, help="share of the documents")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    splits = Splits(arguments.folder, arguments.held_out)
    print(f"{'':24} {'documents':>10} {'bytes':>12} {'paragraphs dropped':>20} {'their bytes':>12}")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs) as pool:
        for package in arguments.packages:
            root = unpack(arguments.folder, package)
            paths = sorted(path for path in root.rglob("*") if is_document(path))
            sums = [0, 0, 0, 0]
            for path, paragraphs in zip(paths, pool.map(paragraphs_of, paths, chunksize=64)):
                counts = splits.add(f"{package}/{path.relative_to(root)}", paragraphs)
                sums = [total + count for total, count in zip(sums, counts)]
            print(f"{package:24} {sums[0]:10} {sums[1]:12} {sums[2]:20} {sums[3]:12}", flush=True)
    for name, (documents, num_bytes) in splits.counts.items():
        print(f"{name:24} {documents:10} {num_bytes:12}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
