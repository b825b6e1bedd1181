"""The processes of an engine: started, connected, watched and ended."""
