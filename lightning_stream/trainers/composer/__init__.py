"""Streamed data in MosaicML Composer: `data_spec`, and the callback that keeps the position."""
