"""Where images live: one store over local disks, anything fsspec reaches, or the memory of the process.

What is in an image is `image/`'s business, when it is taken and kept is `lifecycle/`'s. Start with `store.py` for
the interface, `opening.py` for how configuration becomes a store, `object_store.py` and `deletion.py` for what is
shared and what is deleted when; `custom_space.py` is for places of a user's own (docs/custom-storage.md).
"""

from dagster_ckpt.storage.custom_space import CustomSpace, StoredObject
from dagster_ckpt.storage.deletion import Garbage
from dagster_ckpt.storage.opening import open_store
from dagster_ckpt.storage.store import ImageStore, StoredImage

__all__ = ["CustomSpace", "Garbage", "ImageStore", "StoredImage", "StoredObject", "open_store"]
