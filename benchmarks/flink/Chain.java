import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.Arrays;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import org.apache.flink.api.common.eventtime.Watermark;
import org.apache.flink.api.common.eventtime.WatermarkGenerator;
import org.apache.flink.api.common.eventtime.WatermarkOutput;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource.NumberSequenceSplit;
import org.apache.flink.api.connector.source.util.ratelimit.RateLimiter;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.ExecutionOptions;
import org.apache.flink.configuration.MetricOptions;
import org.apache.flink.configuration.PipelineOptions;
import org.apache.flink.configuration.RestOptions;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.datastream.KeyedStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.operators.AbstractStreamOperator;
import org.apache.flink.streaming.api.operators.OneInputStreamOperator;
import org.apache.flink.streaming.runtime.streamrecord.StreamRecord;
import org.apache.flink.util.Collector;

/**
 * Chains of keyed stages in one process of Flink, with a shuffle before each stage.
 *
 * <p>Each line of standard input is a job: {@code settings stages ticks interval_ms fetch_ms}. The answer is a line
 * of standard output: {@code done}, and for each tick the moment at which the later source task emitted the event of
 * this tick, a colon, and the moment at which the later task of the last stage had the watermark. Moments are
 * nanoseconds of the monotonic clock.
 */
public final class Chain {
    private static final int PARALLELISM = 2;
    private static final long FIRST = 1_767_225_600_000L;
    private static final String TUNED = "tuned";
    private static final long KEYS = 128;
    private static final long SETTLE_NS = 500_000_000L;

    private static final ScheduledExecutorService CLOCK =
            Executors.newScheduledThreadPool(
                    1,
                    run -> {
                        Thread thread = new Thread(run, "schedule");
                        thread.setDaemon(true);
                        return thread;
                    });

    // Shared by all tasks: they are threads of this process.
    private static volatile long[][] emitted;
    private static volatile long[][] visible;
    private static long start;

    private Chain() {}

    /** {@code arguments}: the port of the REST API. */
    public static void main(String[] arguments) throws Exception {
        int port = Integer.parseInt(arguments[0]);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        System.out.println("ready");
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ");
            run(
                    port,
                    words[0].equals(TUNED),
                    Integer.parseInt(words[1]),
                    Integer.parseInt(words[2]),
                    Integer.parseInt(words[3]),
                    Integer.parseInt(words[4]));
        }
    }

    private static void run(int port, boolean tuned, int stages, int ticks, int intervalMs, int fetchMs)
            throws Exception {
        emitted = new long[PARALLELISM][ticks];
        visible = new long[PARALLELISM][ticks];
        start = 0;
        StreamExecutionEnvironment env =
                StreamExecutionEnvironment.createLocalEnvironment(PARALLELISM, settings(port, tuned, fetchMs));
        build(env, tuned, stages, ticks, intervalMs);
        env.execute("chain");
        StringBuilder answer = new StringBuilder("done");
        for (int tick = 0; tick < ticks; tick++) {
            answer.append(' ').append(Math.max(emitted[0][tick], emitted[1][tick]));
            answer.append(':').append(Math.max(visible[0][tick], visible[1][tick]));
        }
        System.out.println(answer);
    }

    private static Configuration settings(int port, boolean tuned, int fetchMs) {
        Configuration settings = new Configuration();
        settings.set(RestOptions.PORT, port);
        settings.set(RestOptions.BIND_PORT, String.valueOf(port));
        settings.set(MetricOptions.METRIC_FETCHER_UPDATE_INTERVAL, Duration.ofMillis(fetchMs));
        if (tuned) {
            settings.set(ExecutionOptions.BUFFER_TIMEOUT, Duration.ZERO);
            settings.set(PipelineOptions.OBJECT_REUSE, true);
        }
        return settings;
    }

    private static void build(
            StreamExecutionEnvironment env, boolean tuned, int stages, int ticks, int intervalMs) {
        DataGeneratorSource<Long> source =
                new DataGeneratorSource<>(
                        index -> event(index, ticks),
                        (long) ticks * PARALLELISM,
                        parallelism -> new Schedule(intervalMs),
                        Types.LONG);
        WatermarkStrategy<Long> strategy =
                tuned
                        ? WatermarkStrategy.forGenerator(context -> new WithEachEvent())
                        : WatermarkStrategy.forMonotonousTimestamps();
        DataStream<Long> stream =
                env.fromSource(source, strategy.withTimestampAssigner((time, before) -> time), "source");
        for (int stage = 1; stage < stages; stage++) {
            stream = keyed(stream).process(new Forward()).name("stage-" + stage);
        }
        keyed(stream).transform("last", Types.LONG, new Last());
    }

    private static KeyedStream<Long, Long> keyed(DataStream<Long> stream) {
        return stream.keyBy(time -> time % KEYS, Types.LONG);
    }

    /** The event of a tick, by its place in the split of a source task. Each task has one split. */
    private static long event(long index, int ticks) {
        int tick = (int) (index % ticks);
        emitted[(int) (index / ticks)][tick] = System.nanoTime();
        return FIRST + tick;
    }

    private static synchronized long started() {
        if (start == 0) {
            start = System.nanoTime() + SETTLE_NS;
        }
        return start;
    }

    /** Lets an event through at each tick, whatever becomes of the earlier ones. */
    private static final class Schedule implements RateLimiter<NumberSequenceSplit> {
        private final long intervalNs;
        private long next;

        Schedule(int intervalMs) {
            intervalNs = TimeUnit.MILLISECONDS.toNanos(intervalMs);
        }

        @Override
        public CompletionStage<Void> acquire(int events) {
            CompletableFuture<Void> due = new CompletableFuture<>();
            long at = started() + next++ * intervalNs;
            CLOCK.schedule(() -> due.complete(null), at - System.nanoTime(), TimeUnit.NANOSECONDS);
            return due;
        }
    }

    /** Emits a watermark with each event, in place of one every 200 ms. */
    private static final class WithEachEvent implements WatermarkGenerator<Long> {
        @Override
        public void onEvent(Long event, long time, WatermarkOutput output) {
            output.emitWatermark(new Watermark(time - 1));
        }

        @Override
        public void onPeriodicEmit(WatermarkOutput output) {}
    }

    private static final class Forward extends KeyedProcessFunction<Long, Long, Long> {
        @Override
        public void processElement(Long time, Context context, Collector<Long> out) {
            out.collect(time);
        }
    }

    /** Notes the moment at which the watermark has reached each event. */
    private static final class Last extends AbstractStreamOperator<Long>
            implements OneInputStreamOperator<Long, Long> {
        private int latest;

        @Override
        public void processElement(StreamRecord<Long> record) {}

        @Override
        public void processWatermark(org.apache.flink.streaming.api.watermark.Watermark mark)
                throws Exception {
            super.processWatermark(mark);
            long now = System.nanoTime();
            long[] mine = visible[getRuntimeContext().getTaskInfo().getIndexOfThisSubtask()];
            // Flink's watermark t - 1 promises that all later events have at least the time t.
            int reached = (int) Math.min(mine.length, mark.getTimestamp() - FIRST + 2);
            if (reached > latest) {
                Arrays.fill(mine, latest, reached, now);
                latest = reached;
            }
        }
    }
}
