"""The pages of the documentation: their code runs, what they quote is said by the code, and the site builds."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OF_TORCH = "DataLoader with IterableDataset: expected unspecified shuffle option"
OF_SPARK = "Failed to find the data source: mds"
OF_HYDRA = {"is not in struct", "To append to your default list use +data="}
OF_OTHER_PACKAGES = {OF_TORCH, OF_SPARK, "default auth", "Can't pickle", *OF_HYDRA}


def _texts(source: Path) -> str:
    """All texts of a module but docstrings, with an ellipsis for what is filled in."""
    parts = []
    nodes = list(ast.walk(ast.parse(source.read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts.append("".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            parts.append(node.value)
    return "\n".join(parts)


def test_messages_that_the_pages_explain_are_messages_of_the_code() -> None:
    sources = [one for folder in ("lightning_stream", "recipes") for one in sorted((ROOT / folder).rglob("*.py"))]
    messages = "\n".join(map(_texts, [*sources, ROOT / "train.py"]))
    quoted = re.findall(r"^### `(.+?)`", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert len(quoted) > 15
    for page in ("storage.md", "spark.md", "databricks.md"):
        table = (DOCS / page).read_text().split("## Typical errors")[1].split("\n## ")[0]
        for row in table.splitlines():
            quoted += re.findall(r"`([^`]+)`", row.split(" | ")[0])
    quoted = [one for one in quoted if one not in OF_OTHER_PACKAGES]
    absent = [part for one in quoted for part in re.split("…", one) if part.strip() not in messages]
    assert not absent


def test_torch_says_what_the_page_quotes_of_a_loader_that_shuffles() -> None:
    data = pytest.importorskip("torch.utils.data")
    from lightning_stream import StreamingDataset

    with pytest.raises(ValueError, match=OF_TORCH):
        data.DataLoader(StreamingDataset(remote="shards"), shuffle=True)


OF_OTHERS = {  # each constructor's keywords, in mosaicml-streaming 0.13 and LitData 0.2.76
    "streaming.StreamingDataset": """streams remote local split download_retry download_timeout validate_hash keep_zip
        epoch_size predownload cache_limit sampling_method sampling_granularity partition_algo num_canonical_nodes
        batch_size shuffle shuffle_algo shuffle_seed shuffle_block_size batching_method allow_unsafe_types replication
        stream_name stream_config""",
    "streaming.Stream": """remote local split proportion repeat choose download_retry download_timeout validate_hash
        keep_zip""",
    "streaming.MDSWriter": """columns out keep_local compression hashes size_limit progress_bar max_workers retry
        exist_ok extra_bytes_per_shard extra_bytes_per_sample""",
    "litdata.StreamingDataset": """input_dir cache_dir item_loader shuffle drop_last seed serializers max_cache_size
        subsample encryption storage_options session_options max_pre_download index_path force_override_state_dict
        transform num_canonical_nodes batch_decode item_shuffle_window window_direct_io""",
    "litdata.StreamingDataLoader": """dataset batch_size num_workers profile_batches profile_skip_batches profile_dir
        profile_cprofile prefetch_factor shuffle drop_last collate_fn""",
    "litdata.optimize": """fn inputs output_dir queue input_dir weights chunk_size chunk_bytes align_chunking
        compression compression_level compression_batch_size encryption num_workers fast_dev_run num_nodes machine
        num_downloaders
        num_uploaders reorder_files reader batch_size mode use_checkpoint item_loader start_method optimize_dns
        storage_options keep_data_ordered verbose broadcast_paths key_fn""",
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_the_page_on_migrating_tells_of_every_argument(name: str) -> None:
    page = (DOCS / "migrating.md").read_text()
    ours, theirs = page.split("## From LitData")
    named = set(re.findall(r"`(\w+)[=(`]", ours if name.startswith("streaming") else theirs))
    assert set(OF_OTHERS[name].split()) - named == set()


def test_what_the_page_on_migrating_calls_the_same_is_an_argument_here() -> None:
    from lightning_stream import MDSWriter, Stream, StreamingDataset

    for name, ours in (("StreamingDataset", StreamingDataset), ("Stream", Stream), ("MDSWriter", MDSWriter)):
        theirs = set(OF_OTHERS[f"streaming.{name}"].split())
        assert theirs - set(signature(ours).parameters) <= {"extra_bytes_per_shard", "extra_bytes_per_sample"}


def _defaults(*kinds: Callable[..., object]) -> dict[str, object]:
    """The arguments of constructors with their defaults."""
    parameters = [one for kind in kinds for one in signature(kind).parameters.values()]
    return {one.name: one.default for one in parameters if one.kind is not Parameter.VAR_KEYWORD}


def _tables_of(title: str) -> tuple[dict[str, object], set[str]]:
    """The arguments that a section of the page of arguments shows, with their defaults; and those with a dagger."""
    section = (DOCS / "arguments.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    cells = [re.fullmatch(r"\| `(\w+)`( †)? \| (?:required|`(.+?)`) \| [^|]+\. \|", row) for row in rows]
    matches = [match for match in cells if match]
    assert len(matches) == len(rows) == len({match[1] for match in matches}), "each once, its reason a sentence"
    shown = {match[1]: ast.literal_eval(match[3]) if match[3] else Parameter.empty for match in matches}
    return shown, {match[1] for match in matches if match[2]}


def _same(shown: dict[str, object], defaults: dict[str, object]) -> bool:
    return {name: repr(value) for name, value in shown.items()} == {name: repr(one) for name, one in defaults.items()}


def test_the_page_of_arguments_has_each_one_with_its_default() -> None:
    pytest.importorskip("torch", reason="the loader needs torch: uv sync")
    from lightning_stream import PositionTracker, Stream, StreamingDataLoader, StreamingDataset
    from lightning_stream.loading.loader_arguments import WorkerOptions
    from lightning_stream.trainers.options import PositionOptions, RunOptions
    from lightning_stream.trainers.run import Run

    for kind in (StreamingDataset, Stream):
        assert _same(_tables_of(kind.__name__)[0], _defaults(kind))
    workers, run = _tables_of("Workers")[0], _tables_of("Options of a run")[0]
    loader = _tables_of("StreamingDataLoader")[0]
    assert set(workers) == set(WorkerOptions.__annotations__)
    assert not set(workers) & set(loader)
    assert _same(loader | workers, _defaults(StreamingDataLoader))
    assert set(run) == set(RunOptions.__annotations__)
    assert set(list(run)[:4]) == set(PositionOptions.__annotations__)
    of_run = _defaults(PositionTracker, Run)
    assert _same(run, {name: of_run[name] for name in RunOptions.__annotations__})


def test_the_page_of_arguments_has_the_parts_of_each_and_all_former_ones() -> None:
    from lightning_stream.former_names import FORMER, PARTS

    _, parts, former = re.split(
        r"\n## (?:Arguments with parts|Former arguments)\n", (DOCS / "arguments.md").read_text()
    )
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+\. \|$", parts, re.MULTILINE)
    assert {name: tuple(re.findall(r"\w+", shown)) for name, shown in rows} == {
        name: (*usual, *others) for name, (usual, others) in PARTS.items()
    }
    cells = re.findall(r"^\| (`.+`) \| `(\w+)=", former, re.MULTILINE)
    assert {now: re.findall(r"\w+", names) for names, now in cells} == {now: [*names] for now, names in FORMER.items()}


def test_the_page_of_arguments_marks_those_that_the_page_on_migrating_has() -> None:
    for name in ("StreamingDataset", "Stream"):
        assert _tables_of(name)[1] == set(OF_OTHERS[f"streaming.{name}"].split())
    table = (DOCS / "migrating.md").read_text().split("| of `StreamingDataLoader` | here |")[1].split("\n\n")[0]
    theirs = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)", row.split("|")[1])}
    assert _tables_of("StreamingDataLoader")[1] | _tables_of("Workers")[1] == theirs
    assert not _tables_of("Options of a run")[1]


def test_the_api_page_has_every_public_name() -> None:
    import lightning_stream
    import lightning_stream.convert
    import lightning_stream.spark

    shown = set(re.findall(r"^::: \S+\.(\w+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE))
    public = {*lightning_stream.__all__, *lightning_stream.spark.__all__, *lightning_stream.convert.__all__}
    assert public - {"LightningStreamError"} <= shown  # that one is in the section of all errors


def test_the_members_that_the_api_page_lists_are_shown() -> None:
    pytest.importorskip("torch", reason="the loader needs torch: uv sync")
    listed = []
    for section in (DOCS / "api.md").read_text().split("\n::: ")[1:]:
        module, name = section.split()[0].rsplit(".", 1)
        for members in re.findall(r"\bmembers: \[(.*?)\]", section):
            kind, inherits = getattr(import_module(module), name), "inherited_members: true" in section
            hidden = [one for one in members.split(", ") if hasattr(kind, one) and one not in vars(kind)]
            assert inherits or not hidden, name
            listed.append(name)
    assert {"StreamingDataset", "StreamingDataLoader", "Chain"} <= {*listed}


def test_the_files_that_the_architecture_page_names_are_there() -> None:
    page = (DOCS / "architecture.md").read_text()
    files = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", page))
    absent = {one for one in files if not any((top / one).exists() for top in (ROOT / "lightning_stream", ROOT))}
    assert len(files) > 30
    assert not absent


def test_the_drawings_are_those_that_the_code_makes() -> None:
    names = runpy.run_path(str(DOCS / "drawings.py"))
    for name, draw in names["DRAWINGS"].items():
        committed = (DOCS / "drawings" / f"{name}.svg").read_text()
        assert draw().svg() == committed, "python docs/drawings.py docs/drawings writes them again"
    shown = {one for page in DOCS.glob("*.md") for one in re.findall(r"\]\(drawings/(\w+)\.svg\)", page.read_text())}
    assert shown == set(names["DRAWINGS"])


@pytest.mark.skipif(
    find_spec("mkdocstrings") is None, reason="the site's tools are not here: uv sync --group docs brings them"
)
@pytest.mark.filterwarnings("ignore")  # the tools' own
def test_the_site_builds_without_a_broken_link_or_anything_from_elsewhere(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))  # strict: a broken link raises
    pages = list((tmp_path / "site").glob("*.html"))
    assert {"index.html", "concepts.html", "api.html"} <= {page.name for page in pages}
    assert (tmp_path / "site" / "llms.txt").read_text() == (ROOT / "llms.txt").read_text()
    concepts = (tmp_path / "site" / "concepts.html").read_text()
    drawings = re.findall(r'<img[^>]+src="(drawings/[^"]+)"', concepts)
    assert len(drawings) >= 4
    assert all((tmp_path / "site" / one).stat().st_size > 1000 for one in drawings)
    loaded = [
        link
        for page in pages
        for link in re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
    ]
    assert not [link for link in loaded if not link.endswith("/") or "fonts" in link]


def test_llms_txt_is_what_the_table_of_contents_gives() -> None:
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    assert (ROOT / "llms.txt").read_text() == hooks["llms_txt"](), "python docs/hooks.py writes it again"
