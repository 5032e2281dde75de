"""A query that ends: it handles what its topics have, in Spark's own batches."""


def process_available(records, handle, settings, name):
    """Continues the query from its last commit up to the present end."""
    query = (
        records.writeStream.foreachBatch(handle)
        .option("checkpointLocation", f"{settings.checkpoint}/{name}")
        .outputMode("update")
        .trigger(availableNow=True)
    )
    query.start().awaitTermination()
