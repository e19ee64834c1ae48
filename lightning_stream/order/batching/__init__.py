"""The batching methods: one file each."""
