"""Every type that is sent between processes, frozen and free of torch, so that doors may import it.

A door sends a `Reservation` to a decode worker and a `PrefillJob` to a prefill group, which answers with
`ChunkRead` … `PrefillDone`. Stages meanwhile announce KV to the decode worker (`KVAnnouncement`,
`FirstLogits`). Then the door sends the decode worker a `GenerateJob` (or `KeepSession`) and reads `Token` …
`FinishEvent`. Durations are seconds; `deadline` is seconds since the epoch.
"""
