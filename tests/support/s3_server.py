"""A server of the S3 protocol on this machine, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """URL of an empty bucket; its server is found through the usual environment while the block runs."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "made-up")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            patch.setenv(name, os.devnull)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # one of another server would go on with that
        fsspec.filesystem("s3").makedirs(bucket, exist_ok=True)
        yield f"s3://{bucket}"
    server.stop()
