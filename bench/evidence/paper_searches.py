"""What `tessera plan` finds for the models, batches and GPUs of published rows, beside the layouts that their sources chose."""
import concurrent.futures
import json
import pathlib
import threading

import paper_rows

SETTING = ("model", "hardware", "gpus", "global_batch", "sequence_length", "precision")
SAME = 0.005


def list_settings(program, models):
    """The fastest published row of each setting that a row's layout can be simulated in: what its source recommends, or found best."""
    best = {}
    for row in paper_rows.load_rows():
        theirs, _ = paper_rows.measured_of(row)
        if theirs is None or paper_rows.command_of(program, row, models)[0] is None:
            continue
        setting = tuple(row[key] for key in SETTING)
        if setting not in best or theirs > best[setting][0]:
            best[setting] = (theirs, row)
    return [row for _, row in best.values()]


def shorten(found):
    """What the page says of a simulated layout."""
    return {**{key: found[key] for key in ("layout", "tflops", "memory_bytes", "fits")}, **paper_rows.stage_shares(found)[1]}


def search_one(program, row, models):
    one = paper_rows.simulate(program, row, models)
    if "error" not in one:
        return {"id": row["id"], "why": one["why"]}
    published, found = paper_rows.explain_here(program, one, models), paper_rows.search(program, row, models)
    if not published or not found:
        return {"id": row["id"], "why": "nothing found" if published else "refused"}
    return {"id": row["id"], "chunks": one["chunks"], "published": shorten(published), "found": shorten(found)}


def search_all(program, models, path, jobs):
    """One line of JSON a setting in the file, which is gone on with where it is there already."""
    path = pathlib.Path(path)
    known = {one["id"]: one for one in map(json.loads, path.read_text().splitlines())} if path.exists() else {}
    rows = list_settings(program, models)
    lock = threading.Lock()

    def search(row):
        one = search_one(program, row, models)
        with lock, path.open("a") as file:
            file.write(json.dumps(one) + "\n")
        return one

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for one in pool.map(search, [row for row in rows if row["id"] not in known]):
            known[one["id"]] = one
    return [(row, known[row["id"]]) for row in rows]


def waits(one):
    return f"{one['exposed']:.0%}, {one['idle']:.0%}"


def list_searches(searches, describe):
    found = [(row, one) for row, one in searches if "found" in one]
    if not found:
        return []
    gains = [one["found"]["tflops"] / one["published"]["tflops"] - 1 for _, one in found]
    slower = [one for (_, one), gain in zip(found, gains) if gain < -SAME]
    too_large = sum(not one["published"]["fits"] for one in slower)
    lines = ["## Published optima and the search", "",
             "`tessera plan` with the model, the batch and the GPUs of rows, the fastest that a source has of each setting, and nothing else given: the",
             "layout that it finds, beside the published one, both of this program with all that it hides. Behind each, shares of the step that the busiest",
             f"stage waits for exchanges and for other stages. Of the {len(found)} settings searched it finds as fast a layout or a faster one in {len(found) - len(slower)}"
             f" (a faster one, by over {SAME:.1%}, in {sum(gain > SAME for gain in gains)})."
             + (f" Of the other {len(slower)} published layouts {too_large} need more memory here than a GPU has, which the search does not take."
                if slower else ""), "",
             "| fastest published | layout | simulated | waits | found | simulated | waits | gain |", "|---|---|---|---|---|---|---|---|"]
    for (row, one), gain in zip(found, gains):
        published, better = one["published"], one["found"]
        note = "" if published["fits"] else f" ({published['memory_bytes'] / 2**30:.0f} GiB)"
        lines.append(f"| {row['id']} | {describe(row, one['chunks'])}{note} | {published['tflops']:.0f} TFLOPS | {waits(published)} | "
                     f"{better['layout']} | {better['tflops']:.0f} | {waits(better)} | {gain:+.0%} |")
    missed = [(row, one) for row, one in searches if one.get("why") == "nothing found"]
    lines += [""] + [f"- {row['id']}: the search finds nothing that fits." for row, _ in missed] + ([""] if missed else [])
    return lines
