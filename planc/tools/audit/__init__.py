"""`planc audit transformers`: the parallel plans of transformers' folders, proved or refuted."""
