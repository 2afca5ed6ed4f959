"""How graphs are rewritten: verdicts, the registry of passes, the pipeline that runs them and the ledger it keeps."""
