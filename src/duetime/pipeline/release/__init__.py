"""Release: when slots of the wheel are acquired, and the Spark job that empties them.

`scheduler` plans (near slots itself, far ones through `cascades`), `job` sends and routes on, and
`slot_indexer` lets a single message be found in a large slot. Where messages wait is in `stores`;
what a crash leaves behind is in `recovery`.
"""
