import com.softwaremill.kmq.KafkaClients;
import com.softwaremill.kmq.KmqClient;
import com.softwaremill.kmq.KmqConfig;
import com.softwaremill.kmq.RedeliveryTracker;
import java.util.HashSet;
import java.util.Set;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** kmq's own client, which forgets what begins with "drop" the first time, or its own tracker. */
class Interop {
    public static void main(String[] arguments) throws Exception {
        String topic = arguments[2];
        KafkaClients clients = new KafkaClients(arguments[1]);
        KmqConfig config = new KmqConfig(
            topic, topic + "__markers", "java-workers", "java-tracker", 2_000, 1_000);
        if (arguments[0].equals("tracker")) {
            RedeliveryTracker.start(clients, config);
            Thread.sleep(Long.MAX_VALUE);
        }
        work(new KmqClient<>(
            config, clients, ByteArrayDeserializer.class, ByteArrayDeserializer.class, 100));
    }

    private static void work(KmqClient<byte[], byte[]> client) {
        Set<String> seen = new HashSet<>();
        while (true) {
            for (ConsumerRecord<byte[], byte[]> each : client.nextBatch()) {
                String value = new String(each.value());
                boolean isNew = seen.add(value);
                System.out.println(value + " " + each.partition() + " " + each.offset());
                if (!isNew || !value.startsWith("drop")) {
                    client.processed(each);
                }
            }
        }
    }
}
