"""Component instances of the example, as created by `dg scaffold defs`; `dg` requires the folder."""
