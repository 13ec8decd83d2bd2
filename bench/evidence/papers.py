#!/usr/bin/env python3
"""Published training throughputs beside what the simulator says of the same layout: the page docs/evidence/papers.md.

  bench/evidence/papers.py build/tessera [--write docs/evidence/papers.md] [--only TEXT] [--jobs N] [--json FILE | --figures FILE] [--searches FILE]

Rows are in bench/evidence/papers: papers.json from the papers, recipes.json from the repositories of Megatron-Bridge, NeMo and Megatron-LM,
models.json says how this program names the models; paper_rows.py makes `tessera plan --explain` of them, with what paper_software.py says of
their software. No constant is fitted to one row, two to many (paper_text.py).
Rows without a model, layout or precision that this program has, or without a throughput, are left out and counted. --searches also looks
for the best layout of each setting (paper_searches.py), which takes an hour and goes on with what FILE has already.
"""
import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import statistics
import sys

import paper_rows
import paper_searches
from paper_text import CLASSES, CONSTANTS, HEAD, class_of, spread_of

NEAR = 0.15


def describe_layout(row, chunks):
    parts = [f"{axis.upper()} {row[axis]}" for axis in ("tp", "cp", "pp", "ep", "etp") if (row[axis] or 1) > 1]
    if chunks > 1:
        parts.append(f"VP {chunks}")
    if row["fsdp"]:
        parts.append("FSDP")
    return ", ".join(parts) or "DP"


def list_groups(results):
    groups = collections.defaultdict(list)
    for one in results:
        if one["row"]["ranking_group"]:
            groups[one["row"]["ranking_group"]].append(one)
    return {name: group for name, group in groups.items() if len(group) > 1}


def compare_rankings(results):
    """Of rows that a source compares with each other: pairs that differ by over 5 %, and in how many ours agree; and where ours has another
    best, how far its figure is below the best of theirs."""
    pairs = agreed = best = 0
    misses = []
    groups = list_groups(results)
    for name, group in groups.items():
        first, ours = max(group, key=lambda one: one["theirs"]), max(group, key=lambda one: one["ours"])
        if first is ours:
            best += 1
        else:
            misses.append((name, first, ours, ours["theirs"] / first["theirs"] - 1, first["ours"] / ours["ours"] - 1))
        for i, one in enumerate(group):
            for other in group[i + 1:]:
                ratio = one["theirs"] / other["theirs"]
                if one["figure"] != other["figure"] or 1 / 1.05 < ratio < 1.05:
                    continue
                pairs += 1
                agreed += (ratio > 1) == (one["ours"] > other["ours"])
    return {"groups": len(groups), "best": best, "pairs": pairs, "agreed": agreed, "misses": misses}


def summarise(name, results):
    errors = [one["error"] for one in results]
    if not errors:
        return f"| {name} | 0 | | | | |"
    hidden = statistics.median([one["hidden"] for one in results])
    return (f"| {name} | {len(errors)} | {statistics.median(errors):+.0%} | {statistics.median([abs(error) for error in errors]):.1%} | "
            f"{sum(abs(error) <= NEAR for error in errors)} | {hidden:+.0%} |")


def list_sources(results):
    lines = ["| source | rows | median error | median of sizes | within 15 % | this program |", "|---|---|---|---|---|---|"]
    by_source = collections.defaultdict(list)
    for one in results:
        row = one["row"]
        precision = "BF16" if row["precision"] == "bf16" else "FP8"
        by_source[", ".join([paper_rows.source_of(row), row["hardware"].upper(), precision])].append(one)
    return lines + [summarise(name, by_source[name]) for name in sorted(by_source)] + [summarise("all", results)]


def list_classes(results):
    spread = spread_of(results)
    lines = ["| rows with | number | median error | within 15 % | this program | what explains it |", "|---|---|---|---|---|---|"]
    for name, _, why in CLASSES:
        ones = [one for one in results if class_of(one, spread) == name]
        if not ones:
            continue
        errors = [one["error"] for one in ones]
        hidden = statistics.median([one["hidden"] for one in ones])
        lines.append(f"| {name} | {len(errors)} | {statistics.median(errors):+.0%} | {sum(abs(error) <= NEAR for error in errors)} | {hidden:+.0%} | {why} |")
    return lines


def list_rankings(results):
    ranks = compare_rankings(results)
    lines = [f"Of {ranks['groups']} groups of layouts that a source compares, the simulation has the same best in {ranks['best']}; of "
             f"{ranks['pairs']} pairs that differ by over 5 %, the same order in {ranks['agreed']}."]
    if ranks["misses"]:
        lines += ["", "| group with another best | theirs | simulated | that one's figure below their best | their best below it, simulated |", "|---|---|---|---|---|"]
    for name, first, ours, theirs, simulated in ranks["misses"]:
        lines.append(f"| {name} | {first['row']['id']} | {ours['row']['id']} | {theirs:+.0%} | {simulated:+.0%} |")
    return lines


def write_page(results, left_out, searches):
    lines = [HEAD, *list_sources(results), "", *list_rankings(results), "", *list_classes(results), "", CONSTANTS, *paper_searches.list_searches(searches, describe_layout)]
    lines += ["## Left out", ""]
    lines += [f"- {count} rows: {why}" for why, count in collections.Counter(one["why"] for one in left_out if not one["why"].startswith("refused")).most_common()]
    lines += ["", "## Rows", "", "| row | model | GPUs | layout | theirs | simulated | error | exposed | idle | memory | this program |",
              "|---|---|---|---|---|---|---|---|---|---|---|"]
    for one in results:
        row = one["row"]
        unit = "TFLOPS" if one["figure"] == "tflops" else "tokens/s"
        lines.append(f"| {row['id']} | {row['model']} | {row['gpus']} {row['hardware'].upper()} | {describe_layout(row, one['chunks'])} | "
                     f"{one['theirs']:,.0f} {unit} | {one['ours']:,.0f} | {one['error']:+.0%} | {one['exposed']:.0%} | {one['idle']:.0%} | "
                     f"{one['memory'] / 2**30:.0f} GiB | {one['hidden']:+.0%} |")
    refused = [one for one in left_out if one["why"].startswith("refused")]
    if refused:
        lines += ["", "Refused by this program:", "", "| row | why |", "|---|---|"]
        lines += [f"| {one['row']['id']} | {one['why'].removeprefix('refused: ').replace('|', '/')} |" for one in refused]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--write", help="the page")
    parser.add_argument("--only", default="", help="rows whose id has this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--figures", help="what --json wrote, in place of simulating the rows again")
    parser.add_argument("--searches", help="also look for the best layouts; the file for what is found")
    options = parser.parse_args()
    models = paper_rows.load_models()
    if options.figures:
        found = json.loads(pathlib.Path(options.figures).read_text())
    else:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            found = list(pool.map(lambda row: paper_rows.simulate(options.program, row, models), paper_rows.load_rows(options.only)))
    results = [one for one in found if "error" in one]
    searches = paper_searches.search_all(options.program, models, options.searches, options.jobs) if options.searches else []
    page = write_page(results, [one for one in found if "error" not in one], searches)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1))
    if options.write:
        pathlib.Path(options.write).write_text(page)
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
