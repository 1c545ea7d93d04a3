"""The peer `s3fs put`: a process that uploads the files of a list. `python -m benchmarks.s3fs_put ENDPOINT ...`."""

from __future__ import annotations

import sys
from pathlib import Path

import s3fs

from benchmarks.s3_server import KEY, SECRET


def main(endpoint: str, listed: Path, root: Path, target: str) -> None:
    """Put files into a bucket.

    Args:
        endpoint: URL of the server.
        listed: A file with one path a line, relative to `root`.
        root: Where the files are.
        target: Bucket and folder they go to.
    """
    names = listed.read_text().splitlines()
    place = s3fs.S3FileSystem(key=KEY, secret=SECRET, client_kwargs={"endpoint_url": endpoint})
    place.put([f"{root}/{name}" for name in names], [f"{target}/{name}" for name in names])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
