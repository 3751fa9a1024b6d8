"""The messages between processes: frozen dataclasses that import no torch.

The API server ("door" in names) sends a `Reservation` to a decode worker and a `PrefillJob` to a prefill
group, which answers with `PrefillQueued`, `ChunkRead` … `PrefillDone`. During prefill, stages announce KV to
the decode worker (`KVAnnouncement`, `FirstLogits`). Then the API server sends the decode worker a
`GenerateJob` or `KeepSession` and receives `Token` … `FinishEvent`. Durations are seconds; `deadline` is
seconds since the epoch.
"""
