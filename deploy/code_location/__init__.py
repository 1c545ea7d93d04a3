"""The code location of the deployment files: replace its streams by yours."""
