"""Rewriting of graphs: verdicts, the registry of passes, the pipeline that runs them, and its ledger."""
