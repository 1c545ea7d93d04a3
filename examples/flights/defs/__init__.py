"""Component instances of the example, as `dg scaffold defs` makes them; `dg` wants the folder to be there."""
