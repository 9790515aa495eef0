{{- /* Puts the values into kvoffd's container and its pod: both are changed in place. */ -}}
{{- define "kvoffd.fill" }}
{{- $pod := .pod }}
{{- $kvoffd := .kvoffd }}
{{- $values := .root.Values }}
{{- range $name := list "nodeSelector" "tolerations" }}
{{- $_ := unset $pod $name }}
{{- with get $values $name }}
{{- $_ := set $pod $name . }}
{{- end }}
{{- end }}
{{- $_ := set $kvoffd.resources "requests" (dict "cpu" $values.cpu "memory" $values.memory) }}
{{- $_ := set $kvoffd.resources "limits" (dict "memory" $values.memory) }}
{{- $env := dict "KVOFFD_POOL_SIZE" $values.poolSize "KVOFFD_ALLOWED_UIDS" $values.allowedUids }}
{{- if $values.disk.path }}
{{- $_ := set $env "KVOFFD_DISK" (printf "/disk=%s" $values.disk.size) }}
{{- $_ := set $kvoffd "volumeMounts" (append $kvoffd.volumeMounts (dict "name" "kvoffd-disk" "mountPath" "/disk")) }}
{{- $directory := dict "path" $values.disk.path "type" "Directory" }}
{{- $_ := set $pod "volumes" (append $pod.volumes (dict "name" "kvoffd-disk" "hostPath" $directory)) }}
{{- end }}
{{- if $values.gpu }}
{{- $_ := set $pod "runtimeClassName" "nvidia" }}
{{- $_ := set $env "NVIDIA_VISIBLE_DEVICES" "all" }}
{{- $_ := set $env "NVIDIA_DRIVER_CAPABILITIES" "compute,utility" }}
{{- end }}
{{- $env = merge (deepCopy $values.env) $env }}
{{- range $kvoffd.env }}
{{- if hasKey $env .name }}
{{- $_ := set . "value" (get $env .name) }}
{{- $_ := unset $env .name }}
{{- end }}
{{- end }}
{{- range $name, $value := $env }}
{{- $_ := set $kvoffd "env" (append $kvoffd.env (dict "name" $name "value" $value)) }}
{{- end }}
{{- end }}
{{- define "kvoffd.image" }}{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
