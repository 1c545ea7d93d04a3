"""The checkpoint page: a small web page over the client, which `dagster-ckpt ui` serves."""
