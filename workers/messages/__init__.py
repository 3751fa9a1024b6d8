"""Every type that crosses a process: frozen and free of torch, so that the front door may import it.

The life of a request in messages: the door asks a decode worker to `Reservation` pages, sends a `PrefillJob`
to a prefill group and reads `ChunkRead` … `PrefillDone`; meanwhile the stages announce K/V to the
decode worker (`KVAnnouncement`, `FirstLogits`). The door then sends a `GenerateJob` (or `KeepSession`) to
the decode worker and reads `Token` … `FinishEvent`. Durations are seconds measured inside one
process; `deadline` is seconds since the epoch.
"""
