"""Buckets on the S3 servers of the tests, and the options that reach them."""

from __future__ import annotations

from typing import Any

KEY, SECRET = "TESTKEY", "TESTSECRET"


def options_of(endpoint: str) -> dict[str, str]:
    """What a store of this package is given."""
    return {"endpoint_url": endpoint, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}


def bucket_at(endpoint: str, name: str = "bucket", **rights: str) -> Any:
    """A client, and such a bucket."""
    import boto3

    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=name, **rights)
    return client


def variables_of(endpoint: str) -> dict[str, str]:
    """What users of S3 set."""
    return {
        "S3_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
