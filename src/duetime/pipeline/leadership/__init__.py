"""Leadership: which of several pipelines delivers, and what keeps a former leader from sending."""
