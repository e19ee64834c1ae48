"""Row shards: JSON lines, CSV, TSV and XSV."""
