"""What the package offers by name; a name added or removed shows here."""

from __future__ import annotations

import pytest

import lightning_stream
from lightning_stream.errors import MissingExtraError, needs

PUBLIC = {
    "CSVWriter",
    "ComposerMixtureFeedback",
    "DecodeCenterCrop",
    "DecodeRandomCrop",
    "GracefulStop",
    "JSONWriter",
    "LightningStreamError",
    "LocalDataset",
    "MDSWriter",
    "MapDataset",
    "MixtureFeedback",
    "Packing",
    "Position",
    "PositionTracker",
    "RunReport",
    "SampleLog",
    "Schedule",
    "StatefulDataLoader",
    "Stream",
    "StreamToTorchDataset",
    "StreamingCallback",
    "StreamingDataLoader",
    "StreamingDataModule",
    "StreamingDataset",
    "StreamingTrainerCallback",
    "TSVWriter",
    "TrainingInterrupted",
    "World",
    "XSVWriter",
    "add_lengths",
    "data_spec",
    "dataframe_to_mds",
    "decode_jpeg",
    "export_prometheus",
    "merge_index",
    "read_position",
    "register_encoding",
    "start_at",
    "verify_delivery",
}


NEEDS_A_TRAINER_OR_SPARK = {
    "ComposerMixtureFeedback",
    "GracefulStop",
    "MixtureFeedback",
    "SampleLog",
    "StreamToTorchDataset",
    "StreamingCallback",
    "StreamingDataModule",
    "StreamingTrainerCallback",
    "TrainingInterrupted",
    "data_spec",
    "dataframe_to_mds",
}


def test_the_public_names_are_these() -> None:
    assert set(dir(lightning_stream)) >= PUBLIC
    assert set(lightning_stream.__all__) == PUBLIC - NEEDS_A_TRAINER_OR_SPARK


def test_a_star_import_needs_no_trainer() -> None:
    names: dict[str, object] = {}
    exec("from lightning_stream import *", names)
    assert names["MDSWriter"] is lightning_stream.MDSWriter


@pytest.mark.filterwarnings("ignore")  # what optional packages say when imported
@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_there_or_says_which_extra_brings_it(name: str) -> None:
    try:
        value = getattr(lightning_stream, name)
    except MissingExtraError as error:
        assert "pip install 'lightning-stream[" in str(error)  # noqa: PT017 - either is right, by what is installed
    else:
        assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Streamer'"):
        _ = lightning_stream.Streamer


def test_an_import_that_fails_for_another_reason_names_no_missing_package() -> None:
    others = (ImportError("cannot import name 'x'"), ModuleNotFoundError("No module named 'rows'", name="rows"))
    for error in others:
        with pytest.raises(ImportError) as caught, needs("pyarrow", "parquet", "reading Parquet"):
            raise error
        assert caught.value is error
    with pytest.raises(MissingExtraError), needs("pyarrow", "parquet", "reading Parquet"):
        raise ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet")
