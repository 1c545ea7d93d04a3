"""Examples of `dagster_ckpt`; they are not part of the installed package."""
