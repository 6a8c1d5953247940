"""What README and documentation say: their Python runs, and their figures are those of the files
beside them."""

import contextlib
import doctest
import functools
import inspect
import io
import json
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pages import PAGES, ROOT, blocks, marked_block, section, tables
from ranks import on_ranks

import tp_headloss
from tp_headloss import HeadLoss, VocabShard, losses, statistics
from tp_headloss.engine.ways import WAYS
from tp_headloss.head_loss.linear_ways import LINEAR_WAYS

README = (ROOT / "README.md").read_text()
TEXT = "\n".join(page.read_text() for page in PAGES)
name_of = {page: str(page.relative_to(ROOT)) for page in PAGES}.get
IN_ORDER = [page for page in PAGES if any(not block.kind for block in blocks(page))]
ON_RANKS = [page for page in PAGES if any(block.kind == "ranks" for block in blocks(page))]


def test_the_readme_is_read_in_minutes():
    assert len(README.splitlines()) <= 250 and len(README.split()) <= 1800
    assert len(README.split("```python")[0].split()) < 700


def code_and_prose(text: str) -> tuple[list[str], str]:
    """The lines of code of a page, without printed output, and its text without code, comments and
    targets of links."""
    fence, before, code, prose = "", "", [], []
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fence = "" if fence else line.strip()
        elif fence or (line.startswith("    ") and (not before or before in code[-1:])):
            code += [line] if fence != "```text" else []
        else:
            prose.append(line)
        before = line
    return code, re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", "", "\n".join(prose), flags=re.S)


def test_pages_are_narrow_and_guides_have_few_numbers():
    """Prints words, numbers per 100 words and the longest line of code of each page (GPU reports
    are not written)."""
    too_wide, too_dense = [], []
    for page in PAGES:
        code, prose = code_and_prose(page.read_text())
        words, width = len(prose.split()), max(map(len, code), default=0)
        share = 100 * len(re.findall(r"(?<![\w.])\d[\d.,]*", prose)) / max(words, 1)
        print(
            f"{name_of(page):32} {words:5} words, {share:4.1f} numbers per 100, code {width:3} columns"
        )
        too_wide += [name_of(page)] if width > 80 and "gpu_check" not in page.name else []
        too_dense += [name_of(page)] if share > 5 and page.parent.name == "guides" else []
    assert not too_wide and not too_dense
    assert len(BENCHMARKS.splitlines()) <= 120


def test_the_page_for_addresses_that_do_not_exist_loads_nothing():
    """A server shows it at any address below any folder, where no relative path leads anywhere; its
    links are those of pages, which its script completes by the site's folder."""
    page = (ROOT / "scripts/docs_theme/404.html").read_text()
    assert not re.findall(r"<link|src=|@import|url\(", page)
    links = re.findall(r'href="(/[^"]+)"', page)
    assert len(links) == page.count("<a href=") > 3
    for link in links:
        assert (ROOT / "docs" / link[1:]).with_suffix(".md").exists(), link


def test_every_command_that_writes_a_run_can_be_run_again():
    commands = [
        c for c in re.findall(r"torchrun (?:(?!\n\n|\n +torchrun)[^`#])*", TEXT) if "launch/" in c
    ]
    # goes on from what is there, writes nothing
    smallest = "launch/trainer", "launch/batch_invariance"
    writing = [c for c in commands if not any(name in c for name in smallest)]
    writing = [c for c in writing if "megatron_pretrain" not in c or "--out" in c]
    assert len(writing) >= 5
    assert all("--overwrite" in command for command in writing), writing


@pytest.mark.parametrize("page", IN_ORDER, ids=name_of)
def test_every_python_block_runs_and_prints_what_the_page_says(page):
    scope = {}
    for block in blocks(page):
        if not block.kind:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(block.code, str(page), "exec"), scope)
            assert said.getvalue() == block.output


WITH_GROUP = [page for page in IN_ORDER if re.search("^group = None", page.read_text(), re.M)]


def replicated_tensors(value, widths: set[int]) -> list[torch.Tensor]:
    """The tensors of a value, or of its fields, that have no dimension of a shard's width."""
    if isinstance(value, (tuple, list)):
        return [x for part in value for x in replicated_tensors(part, widths)]
    if isinstance(value, tp_headloss.HeadLossOutput):
        value = value.loss
    known = isinstance(value, torch.Tensor) and not widths & {*value.shape}
    return [value.detach()] if known else []


def run_page_of_a_group(group, device, page):
    """All blocks of a page with the group in the place of its placeholder -> replicated tensors."""
    torch.manual_seed(dist.get_rank(group))  # what a page does not seed differs between ranks
    scope = {"group": group}
    for block in blocks(page):
        if not block.kind:
            code = re.sub("^group = None.*$", "", block.code, flags=re.M)
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, str(page), "exec"), scope)
    shards = [x for x in scope.values() if isinstance(x, VocabShard) and x.world_size > 1]
    assert shards
    widths = {shard.width for shard in shards}
    return {name: replicated_tensors(value, widths) for name, value in scope.items()}


@pytest.mark.parametrize("page", WITH_GROUP, ids=name_of)
def test_a_page_with_a_group_has_equal_numbers_on_all_its_ranks(page):
    if torch.cuda.is_available():
        pytest.skip("they make their tensors on CPU")
    first, second = on_ranks(2, run_page_of_a_group, page)
    names = [name for name, tensors in first.items() if tensors]
    assert names
    for name in names:
        for ours, theirs in zip(first[name], second[name], strict=True):
            assert torch.equal(ours, theirs), name
            assert name != "out" or ours.isfinite().all()


def run_blocks_on_ranks(group, device, page):
    for block in blocks(page):
        if block.kind == "ranks":
            exec(compile(block.code, str(page), "exec"), {})


@pytest.mark.parametrize("page", ON_RANKS, ids=name_of)
def test_the_blocks_of_several_ranks_run(page):
    if torch.cuda.is_available():
        pytest.skip("they make their tensors on CPU")
    (world_size,) = {int(block.mark) for block in blocks(page) if block.kind == "ranks"}
    on_ranks(world_size, run_blocks_on_ranks, page)


def test_every_marked_block_is_run_somewhere():
    marked = {
        (block.kind, block.mark)
        for page in PAGES
        for block in blocks(page)
        if block.kind in ("host", "run")
    }
    assert len(marked) >= 6
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for kind, mark in marked:
        assert f'marked_block("{kind}", "{mark}")' in tests, (kind, mark)


def of_all_micro_batches(group, device, dp):
    """Gradients and accuracy after the README's step of gradient accumulation; dp = 1: of the whole
    batch at once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 5), torch.nn.Linear(5, 20)).to(device)
    inputs, labels = torch.randint(0, 20, (2, 4, 6), device=device)
    labels[0], labels[3, :5] = -100, -100  # ranks and micro-batches with other numbers of tokens
    if dp == 1:
        out = HeadLoss(metrics=("accuracy",))(model(inputs), labels)
        out.loss.backward()
        return [p.grad.cpu() for p in model.parameters()], float(
            out.metrics["accuracy"] / out.count
        )
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    rank = dist.get_rank(group)
    scope = {
        "torch": torch, "contextlib": contextlib, "dp_group": group, "model": model, "shard": VocabShard(0, 20, 20),
        "micro_batches": list(zip(inputs.chunk(4)[rank::dp], labels.chunk(4)[rank::dp])),
        "head_loss": HeadLoss(metrics=("accuracy",)), "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
    }  # fmt: skip
    exec(compile(marked_block("run", "accumulation"), "README.md", "exec"), scope)
    return [p.grad.cpu() for p in model.parameters()], float(scope["means"]["accuracy"])


def test_gradient_accumulation_on_data_parallel_ranks_is_one_step_of_the_whole_batch():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole, accuracy = of_all_micro_batches(None, device, 1)
    assert min(grad.abs().max() for grad in whole) > 1e-3
    for grads, share in on_ranks(2, of_all_micro_batches, 2):
        assert share == pytest.approx(accuracy, rel=1e-6)
        for ours, expected in zip(grads, whole):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def logits_of_ones_own(group, device):
    """Gradients of a layer below logits that the caller makes, with the hook of the guide."""
    hook = re.search(
        r"`(hidden\.register_hook[^`]*)`", (ROOT / "docs/guides/torch.md").read_text()
    )[1]
    torch.manual_seed(0)
    x, labels = torch.randn(4, 6, device=device), torch.randint(0, 20, (4,), device=device)
    layer, weight = torch.nn.Linear(6, 5).to(device), torch.randn(20, 5, device=device)
    shard, hidden = VocabShard.from_group(group, 20), layer(x)
    if group is not None:
        eval(hook, {"hidden": hidden, "torch": torch, "group": group})
    HeadLoss()(hidden @ weight[shard.start : shard.stop].T, labels, shard=shard).loss.backward()
    return [p.grad.cpu() for p in layer.parameters()]


def test_the_hook_of_the_guide_sums_the_gradient_of_the_hidden_states():
    expected = logits_of_ones_own(
        None, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    for grads in on_ranks(2, logits_of_ones_own):
        for ours, whole in zip(grads, expected):
            torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-6)


PUBLIC = {name: getattr(tp_headloss, name) for name in tp_headloss.__all__}
FUNCTIONS = {
    f"losses.{name}": getattr(losses, name)
    for name in losses.__all__
    if callable(getattr(losses, name))
}
DOCUMENTED = {name: value for name, value in PUBLIC.items() if name != "losses"} | FUNCTIONS


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_name_is_documented_and_its_examples_print_what_they_say(name):
    value = DOCUMENTED[name]
    found = set(
        re.findall(
            r"^(Args|Attributes|Returns|Raises|Examples):$", inspect.getdoc(value) or "", re.M
        )
    )
    assert found & {"Args", "Attributes"} or not inspect.signature(value).parameters
    assert "Examples" in found and (inspect.isclass(value) or "Returns" in found)
    for example in doctest.DocTestFinder(recurse=True).find(
        value, name, globs={"torch": torch, **PUBLIC}
    ):
        said = io.StringIO()
        # what an example registers is its own
        with mock.patch.object(statistics, "FAMILIES", statistics.FAMILIES):
            doctest.DocTestRunner(verbose=False).run(example, out=said.write)
        assert not said.getvalue(), said.getvalue()


@pytest.mark.parametrize("name", [name for name in PUBLIC if hasattr(PUBLIC[name], "_fields")])
def test_help_of_a_result_says_what_its_fields_are(name):
    assert not [
        field for field in PUBLIC[name]._fields if "Alias" in getattr(PUBLIC[name], field).__doc__
    ]


def test_the_reference_has_every_public_name():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    assert not [
        name
        for name in PUBLIC
        if name != "losses" and f"::: tp_headloss.{name}\n" not in f"{pages}\n"
    ]
    members = re.search(
        r"members: \[(.*?)\]", (ROOT / "docs/reference/functions.md").read_text(), re.S
    )[1]
    members = re.findall(r"\w+", members)
    members.append("cross_entropy")  # named on its own, because its module has its name
    assert sorted(f"losses.{name}" for name in members) == sorted(FUNCTIONS)


def figures(value) -> set[str]:
    """The numbers of a row of measurements as the pages write them: whole, and with one and two
    decimals."""
    if isinstance(value, dict):
        return set().union(*map(figures, value.values()))
    if isinstance(value, list):
        return figures(value[1]) if len(value) == 3 else set()  # 10 %, median, 90 %
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return set()
    return {f"{value + nudge:.{digits}f}" for digits in (0, 1, 2) for nudge in (-1e-9, 1e-9)}


@functools.cache
def measured(*files: str) -> list[set[str]]:
    """The figures of every row of docs/bench; a row of the linear head also has its time over its
    bare GEMMs."""
    rows = []
    for path in sorted(
        path for name in files or ["tp*"] for path in (ROOT / "docs/bench").glob(f"{name}.json")
    ):
        content = json.loads(path.read_text())
        of_file = content.get("rows") or [
            row for shape in content["shapes"] for row in shape["rows"]
        ]
        names = "three GEMMs", "four GEMMs", "three GEMMs, again"
        bare = [r for r in of_file if r.get("implementation") in names]
        sizes = "gemms", "tokens", "hidden", "vocab"
        for row in of_file:
            found = figures(row)
            for other in bare if row.get("eager_us") else []:
                if all(row.get(size) == other.get(size) for size in sizes):
                    found |= figures(row["eager_us"][1] / other["eager_us"][1])
            rows.append(found)
    return rows


NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)"
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
RESULTS = README.split("\n## Results\n")[1].split("\n## ")[0]
MEASURED = r"\[\d+ \w{3}(?:, (0\.\d\.\d))?.*?\]\(bench/(\w+)\.json\)"


@pytest.mark.parametrize(
    ("text", "least"), [(BENCHMARKS, 100), (RESULTS, 25)], ids=["benchmarks", "README"]
)
def test_every_figure_of_the_tables_is_in_docs_bench(text, least):
    """A row of one measurement, or each cell of a row of several, is one row of the files that it
    names, or of any."""
    checked = 0
    for table in tables(text):
        for name, *cells in table:
            sources = re.findall(MEASURED, cells[-1])
            cells = cells[:-1] if sources else cells
            rows = measured(*(file for _, file in sources))
            everything = set().union(*rows)
            in_memory = any(re.match(r"[\d.;/ ]+MiB", cell) for cell in cells)
            one = len(sources) == 1 or (not sources and in_memory)
            for part in [cells] if one else [[cell] for cell in cells]:
                wanted = [n for cell in part for n in re.findall(NUMBER, cell)]
                remark = re.search(r"[A-Za-z]{4}|[;/]", " ".join(part[1:] if one else part))
                found = (
                    set(wanted) <= everything if remark else any(set(wanted) <= row for row in rows)
                )
                assert found, f"{name}: {part} is not in docs/bench"
                checked += len(wanted)
    assert checked > least


def test_every_row_of_the_benchmarks_says_when_and_with_what_it_was_measured():
    rows = [row for table in tables(BENCHMARKS) for row in table]
    assert len(rows) >= 40
    for row in rows:
        sources = re.findall(MEASURED, row[-1])
        assert sources, row
        for version, file in sources:
            versions = json.loads((ROOT / f"docs/bench/{file}.json").read_text())["versions"]
            assert version in ("", versions["tp_headloss"]), (row, versions)


def test_the_pages_made_of_docs_bench_have_every_row_of_every_file(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import docs_evidence

    paths = [path for of_page in docs_evidence.groups().values() for path in of_page]
    assert sorted(paths) == sorted((ROOT / "docs/bench").rglob("*.json"))
    checked = 0
    for path in paths:
        rows, (shown,) = (
            docs_evidence.rows_of(json.loads(path.read_text())),
            tables(docs_evidence.table(path)),
        )
        assert len(rows) == len(shown)
        for row, cells in zip(rows, shown):
            if row.get("graph_us") and "tokens" in row:
                time = (
                    row["graph_us"]["both"]
                    if isinstance(row["graph_us"], dict)
                    else row["graph_us"]
                )
                time = time[1] if isinstance(time, list) else time
                assert any(
                    cell and abs(float(cell) - time) <= 5e-4 * time
                    for cell in cells
                    if re.fullmatch(r"[\d.]+", cell)
                )
                checked += 1
    assert checked > 500


def test_a_search_shows_guides_before_reference_and_evidence(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import docs_evidence

    def boost(path, *sections):
        page = SimpleNamespace(
            file=SimpleNamespace(src_uri=path),
            ancestors=[SimpleNamespace(title=title) for title in sections],
            meta={},
        )
        docs_evidence.on_page_markdown("", page)
        return page.meta.get("search", {}).get("boost", 1)

    behind = "Reference", "Evidence", "Project"
    nav = (ROOT / "mkdocs.yml").read_text().split("nav:")[1].split("theme:")[0]
    titles = re.findall(r"^  - (\w+):( #.*)?$", nav, re.M)
    assert {*behind} < {title for title, _ in titles}
    for title, _ in titles:
        assert (boost("page.md", title) < 1) == (title in behind), title
    assert boost("page.md", "Measurements", "Evidence") < 1 == boost("index.md")


PROGRAMS = (ROOT / "docs/guides/programs.md").read_text().replace("\n", " ")


def test_the_quickstarts_largest_difference_is_the_one_that_was_measured():
    found = json.loads((ROOT / "docs/bench/quickstart.json").read_text())
    stated = re.search(r"largest difference of the two training losses was ([\d.e-]+)", PROGRAMS)[1]
    assert stated == f"{found['largest_difference']:.1e}".replace("e-0", "e-")
    assert found["steps"] == 500 and found["versions"]["torch"].split("+")[0] in PROGRAMS


FAILURES = {  # first words of a line of "When ranks fail or disagree" -> tests of it, by file
    "is killed, stops": ("test_faults", "test_survivors_of_a_killed_rank_raise_in_time"),
    "is killed between": (
        "test_faults",
        "test_a_rank_killed_after_the_forward_is_missed_in_the_next_one",
    ),
    "has labels, ignored tokens": (
        "test_faults",
        "test_ranks_that_disagree_on_who_owns_a_label_see_nan",
    ),
    "has a label that": (
        "test_faults",
        "test_what_other_ranks_do_not_look_at_is_silent_and_the_same_everywhere",
    ),
    "has another number": (
        "test_faults",
        "test_packets_of_other_sizes_end_a_rank_and_the_next_call_of_the_other",
    ),
    "has a `check`": (
        "test_faults",
        "test_options_or_shards_of_one_ranks_own_end_a_rank_in_time",
    ),
    "has a temperature": (
        "test_faults",
        "test_a_temperature_of_ones_own_is_silent_and_gives_numbers_of_no_single_call",
    ),
    "any of these but": (
        "test_agreement",
        "test_a_mistake_on_one_rank_is_the_same_exception_on_all",
    ),
    "draws its rows": (
        "test_embedding_ids",
        "test_shards_that_were_drawn_from_one_seed_are_an_error_of_full_validation",
    ),
    "has a term or a metric": (
        "test_agreement",
        "test_full_validation_compares_what_terms_return",
    ),
    "leaves out a backward": (
        "test_clip_grad_norm",
        "test_a_call_that_differs_on_one_rank_is_the_same_error_on_all",
    ),
    "calls `clip_grad_norm_`": (
        "test_clip_grad_norm",
        "test_a_call_that_differs_on_one_rank_is_the_same_error_on_all",
    ),
    "has other replicated gradients": (
        "test_clip_grad_norm",
        "test_ranks_whose_replicated_gradients_differ_have_one_norm",
    ),
}
SAYS = {  # and what the line must say for the test to be about it
    "is killed, stops": "RuntimeError at once",
    "is killed between": "of logits nothing",
    "has labels, ignored tokens": "NaN for that token",
    "has a label that": "the owner's label counts",
    "has another number": "gloo aborts a rank and gives others undefined numbers, or times out",
    "has a `check`": "gloo aborts a rank, or one waits until the timeout",
    "has a temperature": "nothing: numbers that belong to no single call",
    "any of these but": "the same message",
    "draws its rows": 'ValueError on all ranks with `validate="full"`',
    "has a term or a metric": "a ValueError on all ranks",
    "leaves out a backward": "nothing until `clip_grad_norm_` (next row)",
    "calls `clip_grad_norm_`": "ValueError on all ranks, and gradients stay as they were",
    "has other replicated gradients": "counts those of the first rank, and has one norm on all",
}


def test_every_line_about_ranks_that_fail_is_bound_to_a_test():
    (table,) = tables(section("limits.md", "## When ranks fail or disagree"))
    assert len(table) == len(FAILURES)
    for start, (file, test) in FAILURES.items():
        (line,) = [row for row in table if row[0].startswith(start)]
        assert SAYS[start] in line[1], line
        assert f"def {test}(" in (ROOT / f"tests/distributed/{file}.py").read_text()


def test_the_tables_of_ways_are_what_the_ways_say():
    for heading, ways in (("## Logits", WAYS), ("## Hidden states", LINEAR_WAYS)):
        found = re.findall(r"^\| (.*?) \| (.*) \|$", section("ways.md", heading), re.M)[1:]
        said = [(way.name, " ".join(way.__doc__.split("\n\n")[0].split())) for way in ways]
        assert found == said
