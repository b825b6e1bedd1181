"""Load on an OpenAI-compatible server, and what its clients feel.

prompts.py makes `Prompt`s. Load.py decides when each is sent, by a rate or a concurrency. Client.py
sends one and times its events as an `Answer`. Report.py makes figures of the answers. Nothing here
knows whose server it is.
"""
