"""File access: one `FileIO` for snapshots, live directories and the folders of sinks."""
