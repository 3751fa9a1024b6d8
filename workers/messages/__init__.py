"""Every type that is sent between processes, frozen and free of torch, so that doors may import it.

A door sends a decode worker a `Reservation` and a prefill group a `PrefillJob`, and reads `ChunkRead` …
`PrefillDone`. Stages meanwhile announce KV to the decode worker (`KVAnnouncement`, `FirstLogits`). Then the
door sends a `GenerateJob` (or `KeepSession`) and reads `Token` … `FinishEvent`. Durations are seconds;
`deadline` is seconds since the epoch.
"""
